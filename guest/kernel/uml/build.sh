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

[ -e /usr/lib/x86_64-linux-gnu/libc.a ] ||
	fail "the static C library is missing: apt-get install libc6-dev"

fetch_source
configure um
compile linux
finish
