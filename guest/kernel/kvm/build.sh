#!/bin/bash
# Builds the guest kernel of the kvm engine: Debian's source of Linux 7 with our
# patches and options, as an uncompressed ELF file that is entered by its PVH
# note. Usage: build.sh OUT, in an empty scratch directory; needs no root.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?usage: build.sh OUT}"
out=$(realpath "$1")
# shellcheck source=../source.sh
. "$here/../source.sh"

need binutils readelf
[ -e /usr/include/gelf.h ] ||
	fail "the library that reads ELF files is missing: apt-get install libelf-dev"

# The note with the 32-bit entry point is all that the VMM starts the kernel by:
# number 18 of the owner Xen. Symbols and the like may go, the note may not.
check_entry() {
	readelf -nW "$1" | grep -E '^ *Xen +0x[0-9a-f]+.*(0x0*12\)|PHYS32_ENTRY)' >/dev/null ||
		fail "the kernel has no PVH note: it could not be started"
}

fetch_source
configure x86_64
compile vmlinux
check_entry "$out/linux"
finish
