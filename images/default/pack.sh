# Turns the new root, $1, into one read-only file inside itself, below the
# directory run, which is left empty in the image like those that get mounted on.
set -eu
root=$1

echo '==> packing the image'
printf '%s %s\n' "Debian $(cat "$root/etc/debian_version")" "$(date -u +%Y-%m-%d)" >"$root/run/version"
# What is mounted below the root, like the host's processes, stays out of sight.
mount --bind "$root" "$root/mnt"
# The time stamps of the files stay: Python compares those of its sources with
# what it wrote into the compiled files.
mkfs.erofs --quiet --preserve-mtime -U 5d0c2bd4-6e31-4b7e-9f53-bad0f1a5c0de \
	--exclude-regex='^(dev|proc|run|sys|tmp)/.' \
	"$root/run/root.erofs" "$root/mnt"
umount "$root/mnt"
