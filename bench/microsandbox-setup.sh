#!/bin/bash
# Fetches microsandbox and makes what it runs on. Usage: microsandbox-setup.sh FOLDER VERSION IMAGE BED
#   bin/msb, lib   as they are in the wheel of PyPI
#   files.ext4     a file system with the image's files in root/ and an empty home/: microsandbox keeps attributes of
#                  its own at the files of its root, which neither the image nor a file system in memory can have
#   loop.ko        of the test bed's kernel, which cannot mount such a file without
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=../guest/mirror.sh
. "$here/../guest/mirror.sh"
folder=${1:?usage: microsandbox-setup.sh FOLDER VERSION IMAGE BED} version=$2 image=$(realpath "$3") bed=$(realpath "$4")
need erofs-utils fsck.erofs
need e2fsprogs mke2fs
mkdir -p "$(dirname "$folder")"
scratch=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
need_space 3000 .

progress "fetching microsandbox $version"
python3 -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: "microsandbox==$version"
python3 -m zipfile -e microsandbox-*.whl wheel
mkdir done
mv wheel/microsandbox/_bundled/bin wheel/microsandbox/_bundled/lib done/
chmod 755 done/bin/msb

progress "unpacking the image for it"
mkdir -p tree/home
fsck.erofs --extract=tree/root "$image" >/dev/null
size=$(du -sm tree | cut -f 1)
truncate -s "$((size * 5 / 4 + 600))M" done/files.ext4
PATH=$PATH:/usr/sbin:/sbin mke2fs -q -F -t ext4 -m 0 -O ^has_journal -d tree done/files.ext4

kernel=$(sed -n 's/^\(linux-image[^ ]*\) .*/\1/p' "$bed/versions")
progress "fetching $kernel"
private_apt "$scratch/apt" "$(debian_mirror)" bookworm
apt-get "${APT_OPTIONS[@]}" download "$kernel"
dpkg-deb -x "$kernel"_*.deb kernel
cp "$(find kernel -name loop.ko)" done/
mv done "$folder"
