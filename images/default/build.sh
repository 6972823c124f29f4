#!/bin/bash
# Builds the default root image: Debian stable with Python, its data packages and
# Node.js, as one read-only EROFS file. Usage: build.sh OUT, in an empty scratch
# directory; works as root and as an ordinary user with subordinate ids.
set -euo pipefail

# What is mounted here is gone with the last process of the build, however that ends.
if [ "$(id -u)" = 0 ] && [ -z "${OWN_MOUNTS-}" ]; then
	OWN_MOUNTS=1 exec unshare --mount --propagation private bash "$0" "$@"
fi

here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=../../guest/mirror.sh
. "$here/../../guest/mirror.sh"

suite=trixie
# What takes the types out of TypeScript: the package that later versions of Node carry
# inside. Debian has none that is small and quick.
stripper=amaro@1.2.1
stripper_sha512=457341d7f99ba5ba70af8995950818655758e021e5eeb144c70a2ff9739359f821a6c335b36b03ff9bb8a1342428be0fb740463481314958d170b323732b480d
mkdir -p "${1:?usage: build.sh OUT}"
out=$(realpath "$1")

need mmdebstrap mmdebstrap
need erofs-utils mkfs.erofs
need npm npm
need_space 3000 .
need_space 800 "$out"

# The scripts of packages run as the root of a user namespace, never as the
# machine's. mmdebstrap makes one, unless root runs it: root gets one here. The files
# then belong to users who may not pass through a private home directory.
TMPDIR=/var/tmp
if [ "$(id -u)" = 0 ]; then
	# Above the users of sandboxes, and of nobody else.
	first=$((0x7e000000))
	mkdir tree
	chown "$first:$first" tree
	# In this mount namespace alone: what is left of a killed build is found here.
	mount --bind tree "$TMPDIR"
	exchange=$TMPDIR
	# The namespace is there until the last process of the build has closed this pipe.
	exec {keep}> >(exec unshare --user cat)
	holder=$!
	until [ "$(readlink "/proc/$holder/ns/user")" != "$(readlink /proc/self/ns/user)" ]; do
		kill -0 "$holder" || fail "this machine has no user namespaces"
		sleep 0.1
	done
	for map in uid_map gid_map; do
		echo "0 $first 65536" >"/proc/$holder/$map"
	done
	inside=(nsenter "--user=/proc/$holder/ns/user" --setuid 0 --setgid 0 --)
else
	need uidmap newuidmap newgidmap
	grep -q "^$(id -un):" /etc/subuid && grep -q "^$(id -un):" /etc/subgid ||
		fail "no subordinate ids for $(id -un): usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $(id -un)"
	exchange=$PWD
	inside=()
fi
need_space 3000 "$TMPDIR"
export TMPDIR
# What is run in the new root must find its folders there, not where the caller keeps them.
unset XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME XDG_STATE_HOME XDG_RUNTIME_DIR MPLCONFIGDIR
unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE NODE_OPTIONS

mapfile -t dpkg_options < <(sed -n 's/^[^#]/--dpkgopt=&/p' "$here/dpkg.cfg")
packages=$(grep -v '^#' "$here/packages" | paste -s -d ,)
mirror=$(debian_mirror)
security=$(debian_mirror -security)

sources=("deb $mirror $suite main" "deb $mirror $suite-updates main" "deb $security $suite-security main")

progress "fetching $stripper from the registry that npm is set up for"
archive=$exchange/$(npm pack --silent --ignore-scripts --pack-destination "$exchange" "$stripper") ||
	fail "npm cannot fetch $stripper"
sha512sum --check --quiet <<<"$stripper_sha512  $archive" ||
	fail "$stripper is not the package that this recipe was written for"
chmod a+r "$archive"

# The hooks are handed over as text, not as files: their user may be unable to
# read this directory. The image is written into the tree it is made of, because
# that is the one place that user can write, and copied out from there. What is
# left of the tree afterwards is deleted whole, so it needs no cleaning.
progress "installing Debian $suite and $(grep -cv '^#' "$here/packages") packages"
cd "$exchange"
"${inside[@]}" mmdebstrap \
	--mode=unshare --variant=minbase --format=null --skip=cleanup \
	--keyring="$DEBIAN_KEYRING" \
	--include="$packages" \
	--aptopt='Acquire::Languages "none"' \
	--aptopt='Acquire::Retries "3"' \
	"${dpkg_options[@]}" \
	--customize-hook="upload '$archive' /run/stripper.tgz" \
	--customize-hook="$(cat "$here/customize.sh")" \
	--customize-hook="$(cat "$here/pack.sh")" \
	--customize-hook="download /run/root.erofs '$exchange/root.erofs'" \
	--customize-hook="download /run/version '$exchange/version'" \
	"$suite" /dev/null "${sources[@]}"

# Read by who wrote them: a link that was put there leads nowhere else.
for file in root.erofs version; do
	"${inside[@]}" cat "$exchange/$file" >"$out/$file"
done
cp "$here/config.json" "$out/config.json"
progress "root image: $(du -m "$out/root.erofs" | cut -f 1) MB, $(cat "$out/version")"
