# Shared by ./bathy and ./test: system packages and the release build. Meant to be sourced.

# What has to be there, as path:package. A path is looked at instead of asking dpkg, which would take longer than a
# whole sandbox.
RUN_PACKAGES=(
  /usr/bin/bash:bash
  /usr/bin/gcc:gcc
  /usr/lib/x86_64-linux-gnu/libc.a:libc6-dev
  /usr/bin/make:make
  /usr/bin/flex:flex
  /usr/bin/bison:bison
  /usr/bin/bc:bc
  /usr/bin/xz:xz-utils
  /usr/bin/patch:patch
  /usr/include/gelf.h:libelf-dev
  /usr/bin/mmdebstrap:mmdebstrap
  /usr/bin/npm:npm
  /usr/bin/newuidmap:uidmap
  /usr/bin/mkfs.erofs:erofs-utils
  /usr/sbin/mke2fs:e2fsprogs
  /usr/share/keyrings/debian-archive-keyring.gpg:debian-archive-keyring
)
TEST_PACKAGES=(
  /usr/bin/g++:g++
  /usr/sbin/useradd:passwd
  /usr/bin/tmux:tmux
  /usr/sbin/mkfs.xfs:xfsprogs
  /usr/sbin/ip:iproute2
  /usr/bin/openssl:openssl
  /usr/bin/curl:curl
  /usr/bin/python3:python3
  /usr/share/doc/python3-venv:python3-venv
  /usr/bin/qemu-system-x86_64:qemu-system-x86
  /usr/bin/meson:meson
  /usr/bin/ninja:ninja-build
  /usr/bin/pkg-config:pkg-config
  /usr/include/glib-2.0/glib.h:libglib2.0-dev
  /usr/include/pixman-1/pixman.h:libpixman-1-dev
  /usr/include/libfdt.h:libfdt-dev
  /usr/bin/docker-registry:docker-registry
  /usr/bin/skopeo:skopeo
  /bin/busybox:busybox-static
)

say() { printf 'bathysphere: %s\n' "$*" >&2; }

# Installs the packages whose files are missing, or tells an ordinary user which they are and stops.
need_packages() {
  local entry missing=()
  for entry; do
    [ -e "${entry%%:*}" ] || missing+=("${entry##*:}")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    say "some system packages are missing. Ask root to run this, then try again:"
    printf '  apt-get install --no-install-recommends -y %s\n' "${missing[*]}" >&2
    exit 125
  fi
  say "installing system packages: ${missing[*]}"
  local log
  log=$(mktemp)
  if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --no-install-recommends -y "${missing[@]}"; } >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    say "apt-get failed; its last lines are above"
    exit 125
  fi
  rm -f "$log"
}

release_folder() { printf '%s/x86_64-unknown-linux-gnu/release' "${CARGO_TARGET_DIR:-$1/target}"; }

# Builds the release binaries if a source is newer than the last build. Asking cargo every time would cost more than a
# sandbox does.
build_release() {
  local here=$1 stamp
  stamp=$(release_folder "$here")/.built
  if [ -e "$stamp" ] && [ -z "$(find "$here/crates" "$here/guest" "$here/images" "$here/Cargo.toml" "$here/Cargo.lock" "$here/.cargo" -newer "$stamp" -print -quit)" ]; then
    return 0
  fi
  if ! command -v cargo >/dev/null; then
    say "cargo is missing: install the Rust toolchain (1.95 or later)"
    exit 125
  fi
  say "building the programs (once; about two minutes)"
  local began=$EPOCHSECONDS quiet=--quiet
  [ -t 2 ] && quiet=
  (cd "$here" && cargo build --release $quiet --locked -p bathy -p bathy-keeper -p bathy-gateway -p bathy-agent -p bathy-unpack) >&2
  touch -d "@$began" "$stamp"
}
