#!/usr/bin/env bash
# Builds the emulator of the nested test bed: Debian 12's QEMU with our patches, and of it only what the bed uses.
# Usage: build.sh OUT, in an empty scratch directory. Makes OUT/qemu and OUT/qemu-version; needs no root.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
out=$(realpath "${1:?usage: build.sh OUT}")
# shellcheck source=../../../guest/mirror.sh
. "$here/../../../guest/mirror.sh"
SUITE=bookworm

# Python imports what lies beside a program, and meson runs programs from this folder: in /tmp any user can put something there.
mkdir tmp
export TMPDIR=$PWD/tmp

need meson meson
need ninja-build ninja
need pkg-config pkg-config
need_space 1500 .

# The source as Debian has it: their changes to the release are most of what was mended since.
fetch() {
	local mirror version
	mirror=$(debian_mirror)
	private_apt "$PWD/apt" "$mirror" "$SUITE"
	printf 'deb-src [signed-by=%s] %s %s main\n' "$DEBIAN_KEYRING" "$mirror" "$SUITE" >"$PWD/apt/sources.list"
	apt-get "${APT_OPTIONS[@]}" update
	progress "fetching the source of QEMU"
	apt-get "${APT_OPTIONS[@]}" source --download-only qemu
	version=$(sed -n 's/^Version: //p' qemu_*.dsc | head -n 1)
	mkdir source
	tar xJf qemu_*.orig.tar.xz -C source --strip-components=1
	tar xJf qemu_*.debian.tar.xz -C source
	printf '%s\n' "$version" >"$out/qemu-version"
}

apply_patches() {
	local name
	while read -r name; do
		patch -d source -p1 --no-backup-if-mismatch <"source/debian/patches/$name"
	done < <(sed 's/[[:space:]]*#.*//;/^$/d' source/debian/patches/series)
	for name in "$here"/patches/*.patch; do
		patch -d source -p1 --no-backup-if-mismatch <"$name" ||
			fail "$(basename "$name") does not fit QEMU $(cat "$out/qemu-version")"
	done
	# Debian packs the firmware by itself, and without it the description of what to build from it is wrong.
	sed -i "s/^subdir('pc-bios')$/roms = []/" source/meson.build
}

configure() {
	printf 'CONFIG_%s=y\n' Q35 VIRTIO_PCI VHOST_USER_FS >source/configs/devices/x86_64-softmmu/bed.mak
	mkdir build
	cd build
	../source/configure --meson=meson --target-list=x86_64-softmmu --with-devices-x86_64=bed --without-default-devices \
		--without-default-features --enable-system --enable-tcg --enable-vhost-user --enable-fdt=system --disable-install-blobs
}

fetch
apply_patches
configure
progress "compiling the emulator on $(nproc) processors: some minutes"
ninja qemu-system-x86_64
strip -o "$out/qemu" qemu-system-x86_64
