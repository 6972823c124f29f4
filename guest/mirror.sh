# Shared by the recipes of the guest kernel and the default image: where this
# machine gets Debian packages from, and how to ask for some of them without
# touching the system's own apt state. To be sourced by bash.

# What is downloaded must be signed by Debian itself, whoever mirrors it.
DEBIAN_KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

progress() { printf '==> %s\n' "$*"; }

fail() {
	printf 'error: %s\n' "$*" >&2
	exit 1
}

# need PACKAGE COMMAND...: ends with the package's name if a command is missing.
need() {
	local package=$1 command
	shift
	for command; do
		command -v "$command" >/dev/null ||
			fail "$command is missing: apt-get install $package"
	done
}

# need_space MEGABYTES DIRECTORY
need_space() {
	local free
	free=$(df --output=avail -BM "$2" | tail -n 1 | tr -dc 0-9)
	[ "$free" -ge "$1" ] ||
		fail "$2 has $free MB of free disk space, $1 MB are needed"
}

# debian_mirror [SUFFIX]: prints the base address of the Debian archive that this
# machine uses (with SUFFIX -security: of its security archive); ends if there is
# none, since what is built without security updates looks like any other. apt
# itself reads its configuration, so every form of a sources file is understood.
debian_mirror() {
	local suffix=${1:-} release uri uris
	[ -r "$DEBIAN_KEYRING" ] ||
		fail "$DEBIAN_KEYRING is missing: apt-get install debian-archive-keyring"
	release=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-stable}")
	uris=$(apt-get update --print-uris) ||
		fail "apt-get cannot read its list of sources"
	for uri in $(cut -d "'" -f 2 <<<"$uris"); do
		case $uri in
		*/dists/"$release$suffix"/InRelease | */dists/"stable$suffix"/InRelease)
			printf '%s' "${uri%/dists/*}"
			return
			;;
		esac
	done
	fail "no source for Debian $release$suffix in the configuration of apt"
}

# private_apt DIRECTORY MIRROR SUITE: sets APT_OPTIONS so that apt knows only
# SUITE and keeps all its files below DIRECTORY; fetches the list of packages.
private_apt() {
	local dir=$1 mirror=$2 suite=$3
	mkdir -p "$dir/state/lists/partial" "$dir/cache/archives/partial"
	: >"$dir/state/status"
	printf 'deb [signed-by=%s] %s %s main\n' \
		"$DEBIAN_KEYRING" "$mirror" "$suite" >"$dir/sources.list"
	APT_OPTIONS=(
		-q
		-o "Dir::Etc::sourcelist=$dir/sources.list"
		-o Dir::Etc::sourceparts=/dev/null
		-o Dir::Etc::preferences=/dev/null
		-o Dir::Etc::preferencesparts=/dev/null
		-o "Dir::State=$dir/state"
		-o "Dir::State::lists=$dir/state/lists"
		-o "Dir::State::status=$dir/state/status"
		-o "Dir::Cache=$dir/cache"
		-o Acquire::Languages=none
		-o APT::Update::Error-Mode=any
		# The directory may be closed to the user that apt would switch to.
		-o "APT::Sandbox::User=$(id -un)"
	)
	apt-get "${APT_OPTIONS[@]}" update
}
