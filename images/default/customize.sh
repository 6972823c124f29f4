# Runs outside the new root, as its root user; $1 is the new root.
set -eu
root=$1

echo '==> adding the user and the settings'
chroot "$root" useradd --create-home --shell /bin/bash --uid 1000 user
echo 'user ALL=(ALL:ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/user"
chmod 440 "$root/etc/sudoers.d/user"

ln -s python3 "$root/usr/bin/python"
ln -s vim.tiny "$root/usr/bin/vim"
# The sandbox is thrown away after use: pip may install into it.
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED

# Not below /usr/share/nodejs: there, every script could require it without having asked for it.
stripper=usr/local/lib/node_modules/amaro
mkdir -p "$root/$stripper"
tar -xzf "$root/run/stripper.tgz" -C "$root/$stripper" --strip-components=1 --no-same-owner
chmod -R a+rX "$root/$stripper"

echo sandbox >"$root/etc/hostname"
printf '127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost\n' >"$root/etc/hosts"
printf 'nameserver %s\n' 192.0.0.1 fd62:6174:6879::1 >"$root/etc/resolv.conf"
: >"$root/etc/machine-id"

# The test suites of the data packages are a large part of the image. Those of
# numpy stay: numpy.testing, which others import, imports from them.
for package in pandas scipy sympy matplotlib mpl_toolkits; do
	find "$root/usr/lib/python3/dist-packages/$package" -type d -name tests \
		-prune -exec rm -rf {} +
done

# Shows that what is left works, and leaves matplotlib's list of fonts behind:
# without it, the first plot in every sandbox would take seconds longer.
chroot "$root" su user -c 'python3 -c "
import matplotlib.pyplot, numpy.testing, pandas.testing, requests, scipy.stats, sympy"'
chroot "$root" su user -c 'node -e 0 && git --version && curl --version' >/dev/null
chroot "$root" su user -c "node -e '
require(\"/$stripper\").transformSync(\"let x: number = 1\", { mode: \"strip-only\" })'"
mkdir -p "$root/root/.cache"
cp -r "$root/home/user/.cache/matplotlib" "$root/root/.cache/"

rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/cache/debconf/*-old \
	"$root"/var/log/*.log "$root"/var/log/apt
