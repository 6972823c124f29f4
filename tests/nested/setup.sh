#!/usr/bin/env bash
# Fetches what the test bed boots, once for each content of this recipe, outside the checkout. Prints the folder:
#   vmlinuz     Debian 12's cloud kernel
#   initramfs   busybox, the kernel modules that the bed needs, and ./init
#   qemu        what emulates the machine; see emulator/
#   versions    what was fetched, one "name version" a line
# Nothing is installed. The kernel has to be 6.1: under newer ones QEMU's emulated SVM hangs every inner guest.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=../../guest/mirror.sh
. "$here/../../guest/mirror.sh"
SUITE=bookworm
# The shared folders, the writable layers above them, KVM, and the cable of the network suites' world.
MODULES=(virtio_pci virtiofs overlay kvm-amd veth)
# Seconds that another set-up may take before this one gives up.
PATIENCE=1200

# unpack PACKAGE: downloads it, with apt's check of the signature, and unpacks it into ./PACKAGE.
unpack() {
	local package=$1
	progress "fetching $package"
	apt-get "${APT_OPTIONS[@]}" download "$package"
	dpkg-deb -x "$package"_*.deb "$package"
	dpkg-deb -f "$package"_*.deb Package Version | sed -n 's/^[A-Z][a-z]*: //p' | paste -sd ' ' >>versions
	rm "$package"_*.deb
}

build_initramfs() {
	local version=$1 modules=$2 busybox=$3 start=$PWD/start name line file
	mkdir -p "$start"/{bin,dev,proc,sys,share,root,"lib/modules/$version"}
	cp "$busybox" "$start/bin/busybox"
	install -m 755 "$here/init" "$start/init"
	for name in "${MODULES[@]}"; do
		line=$(grep "/$name\.ko:" "$modules/modules.dep") ||
			fail "the kernel package has no module $name"
		printf '%s\n' "$line" >>"$start/needed"
		for file in ${line/:/ }; do
			grep "^$file:" "$modules/modules.dep" >>"$start/needed"
			install -D "$modules/$file" "$start/lib/modules/$version/$file"
		done
	done
	sort -u "$start/needed" >"$start/lib/modules/$version/modules.dep"
	rm "$start/needed"
	(cd "$start" && find . | "$busybox" cpio -o -H newc -R 0:0) >initramfs
}

build() {
	local kernel version busybox=$PWD/busybox-static/bin/busybox
	private_apt "$PWD/apt" "$(debian_mirror)" "$SUITE"
	kernel=$(apt-cache "${APT_OPTIONS[@]}" depends linux-image-cloud-amd64 |
		sed -n 's/^ *Depends: \(linux-image-[0-9]\)/\1/p' | head -n 1)
	version=${kernel#linux-image-}
	case $version in
	6.1.*) ;;
	*) fail "Debian's linux-image-cloud-amd64 in $SUITE is ${kernel:-nothing}, not Linux 6.1" ;;
	esac
	unpack "$kernel"
	unpack busybox-static
	"$busybox" depmod -b "$kernel" "$version"
	mv "$kernel"/boot/vmlinuz-* vmlinuz
	build_initramfs "$version" "$PWD/$kernel/lib/modules/$version" "$busybox"
	rm -r apt start "$kernel" busybox-static
	mkdir scratch
	(cd scratch && "$here/emulator/build.sh" ..)
	rm -r scratch
}

recipe=$(cat "$here"/{setup.sh,init,emulator/build.sh,emulator/patches/*} "$here/../../guest/mirror.sh" | sha256sum | head -c 16)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/bathysphere/tests
folder=$cache/nested-$recipe
if [ ! -e "$folder/complete" ]; then
	mkdir -p "$cache"
	# The lock goes with this process, whatever ends it.
	exec 9>"$cache/nested.lock"
	flock -w "$PATIENCE" 9 || fail "another set-up of the nested test bed did not end"
fi
if [ ! -e "$folder/complete" ]; then
	# What an interrupted set-up left.
	rm -rf "$folder"
	mkdir "$folder"
	cd "$folder"
	need_space 1800 .
	printf 'bathysphere: setting up the nested test bed: its kernel and its emulator (once; about four minutes)\n' >&2
	# In the background, because bash ignores failures inside of a command whose own failure is handled.
	build >"$cache/nested.log" 2>&1 &
	wait $! || {
		tail -n 15 "$cache/nested.log" >&2
		fail "the nested test bed cannot be set up; the whole log is in $cache/nested.log"
	}
	: >complete
fi
printf '%s\n' "$folder"
