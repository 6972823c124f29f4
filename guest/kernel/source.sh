# Shared by the recipes of both guest kernels: where their source comes from, and
# how it is configured and compiled. To be sourced by bash from a build.sh that
# has set $here to its own folder and $out to its result's, in an empty scratch
# directory.

# shellcheck source=../mirror.sh
. "$here/../../mirror.sh"

scratch=$PWD
tree=$scratch/source
# What is asked for and what is refused: of both kernels, and of this one.
config=("$here/../config" "$here/config")
forbidden=("$here/../config.forbidden" "$here/config.forbidden")

need gcc gcc
need make make
need flex flex
need bison bison
need bc bc
need xz-utils xz
need patch patch
need_space 1500 .

# fetch_suite MIRROR SUITE: unpacks the newest Linux 7 of SUITE into $tree and
# sets $version, to nothing if the suite has none. To be called by itself: in a
# condition, bash would go on after a command in it that failed.
fetch_suite() {
	local mirror=$1 suite=$2 package
	version=
	private_apt "$scratch/apt-$suite" "$mirror" "$suite"
	package=$(apt-cache "${APT_OPTIONS[@]}" pkgnames linux-source-7 |
		sed -En '/^linux-source-7\.[0-9]+$/p' | sort -V | tail -n 1)
	[ -n "$package" ] || return 0

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
		tar x -C "$tree" --strip-components=1 --exclude-from="$here/../source.exclude"
	built_at=$(date -u -r "package/usr/src/$package.tar.xz" '+%Y-%m-%d')
	rm -rf package
}

# apply_patches: this kernel's changes to $tree; fails if one does not fit.
apply_patches() {
	local file
	for file in "$here"/patches/*.patch; do
		patch -d "$tree" -p1 -F0 --no-backup-if-mismatch <"$file" || {
			echo "$(basename "$file") does not fit Linux $version"
			return 1
		}
	done
}

# fetch_source: $tree becomes the newest Linux 7 that our patches fit; sets
# $version and $built_at.
fetch_source() {
	local mirror suite
	mirror=$(debian_mirror)
	for suite in trixie-backports sid; do
		fetch_suite "$mirror" "$suite"
		if [ -n "$version" ] && apply_patches; then
			return
		fi
	done
	fail "no Linux 7 that the patches fit on $mirror"
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
	done < <(grep -h '^CONFIG_' "${config[@]}")
	while read -r line; do
		! grep -q "^$line=" "$tree/.config" || {
			echo "forbidden, but on: $line"
			bad=1
		}
	done < <(grep -h '^CONFIG_' "${forbidden[@]}")
	[ "$bad" = 0 ] || fail "the options of the kernel are not those asked for"
}

# configure ARCH: sets $build, the make that compiles $tree.
configure() {
	# The same source gives the same bytes, wherever and by whomever it is built.
	export KBUILD_BUILD_USER=bathysphere KBUILD_BUILD_HOST=bathysphere
	export KBUILD_BUILD_TIMESTAMP=$built_at KBUILD_BUILD_VERSION=1
	build=(make -C "$tree" ARCH="$1" LOCALVERSION= "-j$(nproc)")

	progress "configuring"
	cat "${config[@]}" >"$scratch/config"
	"${build[@]}" KCONFIG_ALLCONFIG="$scratch/config" allnoconfig
	check_config
}

# compile TARGET: makes $out/linux from the program TARGET of $tree.
compile() {
	progress "compiling on $(nproc) processors: some minutes"
	"${build[@]}" "$1"
	strip -o "$out/linux" "$tree/$1"
}

# finish: names the version in $out; the last step.
finish() {
	printf '%s\n' "$version" >"$out/version"
	progress "$(cat "$tree/include/config/kernel.release"): $(du -k "$out/linux" | cut -f 1) kB"
}
