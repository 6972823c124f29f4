#!/bin/bash
# Builds the guest kernel of the uml engine: Debian's source of Linux 7 with our
# patches and options, as one static program. Usage: build.sh OUT, in an empty
# scratch directory; needs no root.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=../mirror.sh
. "$here/../mirror.sh"

mkdir -p "${1:?usage: build.sh OUT}"
out=$(realpath "$1")
scratch=$PWD
tree=$scratch/source

need gcc gcc
need make make
need flex flex
need bison bison
need bc bc
need xz-utils xz
need patch patch
[ -e /usr/lib/x86_64-linux-gnu/libc.a ] ||
	fail "the static C library is missing: apt-get install libc6-dev"
need_space 1500 .

# fetch_source MIRROR SUITE: unpacks the newest Linux 7 of SUITE into $tree and
# sets $version; fails if the suite has none.
fetch_source() {
	local mirror=$1 suite=$2 package
	private_apt "$scratch/apt-$suite" "$mirror" "$suite"
	package=$(apt-cache "${APT_OPTIONS[@]}" pkgnames linux-source-7 |
		grep -E '^linux-source-7\.[0-9]+$' | sort -V | tail -n 1)
	[ -n "$package" ] || return 1

	progress "fetching $package from $suite"
	rm -rf package "$tree"
	apt-get "${APT_OPTIONS[@]}" download "$package"
	version=$(dpkg-deb -f "$package"_*.deb Version)
	dpkg-deb -x "$package"_*.deb package
	rm "$package"_*.deb

	# Other architectures and the sources of drivers for hardware stay packed:
	# a third of the build's files is enough, with every Kconfig among them.
	progress "unpacking Linux $version"
	mkdir "$tree"
	xz -dcT0 "package/usr/src/$package.tar.xz" |
		tar x -C "$tree" --strip-components=1 --exclude-from="$here/source.exclude"
	built_at=$(date -u -r "package/usr/src/$package.tar.xz" '+%Y-%m-%d')
	rm -rf package
}

apply_patches() {
	local file
	for file in "$here"/patches/*.patch; do
		patch -d "$tree" -p1 -F0 --no-backup-if-mismatch <"$file" || {
			echo "$(basename "$file") does not fit Linux $version"
			return 1
		}
	done
}

# Every option that was asked for must have survived Kconfig's dependencies, and
# none of the forbidden ones may have been selected by another.
check_config() {
	local line bad=0
	while read -r line; do
		grep -qxF -- "$line" "$tree/.config" || {
			echo "not in force: $line"
			bad=1
		}
	done < <(grep '^CONFIG_' "$here/uml.config")
	while read -r line; do
		! grep -q "^$line=" "$tree/.config" || {
			echo "forbidden, but on: $line"
			bad=1
		}
	done < <(grep '^CONFIG_' "$here/config.forbidden")
	[ "$bad" = 0 ] || fail "the options of the kernel are not those asked for"
}

mirror=$(debian_mirror)
version=
for suite in trixie-backports sid; do
	fetch_source "$mirror" "$suite" && apply_patches && break
	version=
done
[ -n "$version" ] || fail "no Linux 7 that the patches fit on $mirror"

# The same source gives the same bytes, wherever and by whomever it is built.
export KBUILD_BUILD_USER=bathysphere KBUILD_BUILD_HOST=bathysphere
export KBUILD_BUILD_TIMESTAMP=$built_at KBUILD_BUILD_VERSION=1
build=(make -C "$tree" ARCH=um LOCALVERSION= "-j$(nproc)")

progress "configuring"
"${build[@]}" KCONFIG_ALLCONFIG="$here/uml.config" allnoconfig
check_config

progress "compiling on $(nproc) processors: some minutes"
"${build[@]}" linux

strip -o "$out/linux" "$tree/linux"
printf '%s\n' "$version" >"$out/version"
progress "guest kernel: $(cat "$tree/include/config/kernel.release"), $(du -k "$out/linux" | cut -f 1) kB"
