#!/bin/bash
# Builds the guest kernel of the uml engine: Debian's source of Linux 7 with our
# patches and options, as one static program. Usage: build.sh OUT, in an empty
# scratch directory; needs no root.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?usage: build.sh OUT}"
out=$(realpath "$1")
# shellcheck source=../source.sh
. "$here/../source.sh"

need binutils readelf
[ -e /usr/lib/x86_64-linux-gnu/libc.a ] ||
	fail "the static C library is missing: apt-get install libc6-dev"

# The jail's filter knows the kernel's code by its address: crates/jail/src/filter/address.rs.
TEXT_START=$((0x60000000))
TEXT_END=$((0x60800000))

# check_addresses PROGRAM: all of its code is where the filter expects the kernel's.
check_addresses() {
	local address size count=0
	while read -r address size; do
		[ $((address)) -ge "$TEXT_START" ] && [ $((address + size)) -lt "$TEXT_END" ] ||
			fail "$1 has code at $address, $size bytes, where the jail's filter does not expect it"
		count=$((count + 1))
	done < <(readelf -lW "$1" | sed -En '/ LOAD .* R.E /s/^ *LOAD +[^ ]+ +([^ ]+) +[^ ]+ +[^ ]+ +([^ ]+) .*/\1 \2/p')
	[ "$count" -gt 0 ] || fail "$1 has no code"
}

fetch_source
configure um
compile linux
check_addresses "$tree/linux"
check_addresses "$tree/arch/um/kernel/skas/stub_exe"
finish
