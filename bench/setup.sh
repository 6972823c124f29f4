#!/bin/bash
# Fetches the peers that the benchmarks compare with. Usage: setup.sh CACHE
# bubblewrap and QEMU are installed; the rest is only unpacked below CACHE:
#   runsc, runc       gVisor, and the runtime of ordinary containers
#   vmlinuz, initrd   the guest of QEMU: Debian's cloud kernel and a tiny start
#   versions          what was fetched, one "name version" a line
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=../guest/mirror.sh
. "$here/../guest/mirror.sh"

mkdir -p "${1:?usage: setup.sh CACHE}"
cache=$(realpath "$1")

# install_system_packages: asks for all that is missing in one line.
install_system_packages() {
	local missing=()
	command -v bwrap >/dev/null || missing+=(bubblewrap)
	command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86)
	command -v cpio >/dev/null || missing+=(cpio)
	command -v xz >/dev/null || missing+=(xz-utils)
	command -v fsck.erofs >/dev/null || missing+=(erofs-utils)
	[ ${#missing[@]} -gt 0 ] || return 0
	[ "$(id -u)" = 0 ] ||
		fail "packages are missing: apt-get install --no-install-recommends ${missing[*]}"
	progress "installing ${missing[*]}"
	apt-get -q update
	DEBIAN_FRONTEND=noninteractive \
		apt-get -qy install --no-install-recommends "${missing[@]}"
}

# unpack PACKAGE: downloads it from the suite that private_apt chose last, with
# apt's check of the signature, and unpacks it into ./PACKAGE.
unpack() {
	local package=$1
	progress "fetching $package"
	apt-get "${APT_OPTIONS[@]}" download "$package"
	dpkg-deb -x "$package"_*.deb "$package"
	dpkg-deb -f "$package"_*.deb Package Version |
		sed -n 's/^[A-Z][a-z]*: //p' | paste -sd ' ' >>versions
	rm "$package"_*.deb
}

# add_module NAME: appends the module to the initramfs, after those it needs;
# a name without a file is built into the kernel.
add_module() {
	local name=$1 file needed target
	case " ${added[*]-} " in *" $name "*) return ;; esac
	added+=("$name")
	file=$(find "$modules" -name "$name.ko" -o -name "$name.ko.xz")
	[ -n "$file" ] || return 0
	case $file in
	*.xz) xz -dc "$file" >module.ko ;;
	*) cp "$file" module.ko ;;
	esac
	# modinfo belongs to a package of its own; the section is plain text.
	needed=$(tr '\0' '\n' <module.ko | sed -n 's/^depends=//p' | tr ',' ' ')
	mv module.ko "$name.ko"
	for target in $needed; do add_module "$target"; done
	count=$((count + 1))
	mv "$name.ko" "initramfs/modules/$(printf %02d "$count")-$name.ko"
}

build_guest() {
	local kernel=$1 modules=$PWD/$1/lib/modules added=() count=0 name
	[ -d "$modules" ] || modules=$PWD/$1/usr/lib/modules
	mkdir -p initramfs/{bin,modules,dev,lower,upper,root}
	cp "$(find busybox-static -name busybox -type f -perm -1)" initramfs/bin/busybox
	install -m 755 "$here/microvm-init" initramfs/init
	for name in virtio_mmio virtio_blk erofs overlay; do add_module "$name"; done
	(cd initramfs && find . | cpio --quiet -o -H newc -R 0:0) >initrd
	cp "$kernel"/boot/vmlinuz-* vmlinuz
}

install_system_packages
scratch=$(mktemp -d "$cache/setup.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

mirror=$(debian_mirror)
# Not from unstable: its build of the same gVisor, by a newer Go, panics in about
# every tenth start of Python (assertTaskGoroutine).
private_apt "$scratch/apt-gvisor" "$mirror" trixie
unpack runsc
private_apt "$scratch/apt-kernel" "$mirror" "$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-stable}")"
unpack runc
kernel=$(apt-cache "${APT_OPTIONS[@]}" depends linux-image-cloud-amd64 |
	sed -n 's/^ *Depends: \(linux-image-[0-9]\)/\1/p' | head -n 1)
[ -n "$kernel" ] || fail "Debian's linux-image-cloud-amd64 names no kernel"
unpack "$kernel"
unpack busybox-static
build_guest "$kernel"

# The versions come last: they are the sign of completeness.
mv runsc/usr/bin/runsc runc/usr/sbin/runc vmlinuz initrd "$cache/"
mv versions "$cache/"
