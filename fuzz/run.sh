#!/usr/bin/env bash
# Fuzzes everything that reads bytes of a guest, an image or a registry, each target for a bounded time.
#
#   fuzz/run.sh SECONDS_PER_TARGET [TARGET...]
#
# A target is a file in src/bin; adding one is all that it takes. What was found interesting is kept for the next run,
# and a crashing input is kept beside it. Fails when a target crashes, or does not run at all.
set -euo pipefail

seconds=${1:?usage: fuzz/run.sh SECONDS_PER_TARGET [TARGET...]}
shift
here=$(cd "$(dirname "$0")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/bathysphere
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/fuzz-target}
triple=x86_64-unknown-linux-gnu

if [ $# -gt 0 ]; then
    targets=("$@")
else
    mapfile -t targets < <(cd "$here/src/bin" && ls -- *.rs | sed 's/\.rs$//')
fi

# Set in the environment, these replace the flags for static linking in the workspace's configuration: the address
# sanitizer needs a dynamically linked program.
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
 -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address -Ccodegen-units=1 --cfg fuzzing"
RUSTFLAGS=$(tr -d '\n' <<<"$RUSTFLAGS")

(cd "$here" && cargo +nightly build --quiet --release --target "$triple")

# SQLite, which is linked in and not fuzzed, has two local tables of the same name, which the sanitizer takes for one.
export ASAN_OPTIONS=detect_odr_violation=0${ASAN_OPTIONS:+:$ASAN_OPTIONS}

failed=0
for target in "${targets[@]}"; do
    corpus=$cache/fuzz-corpus/$target
    crashes=$cache/fuzz-crashes/$target
    log=$cache/fuzz-$target.log
    mkdir -p "$corpus" "$crashes"
    # Inputs that once broke something, and that are hard to find.
    seeds=("$corpus")
    if [ -d "$here/seeds/$target" ]; then seeds+=("$here/seeds/$target"); fi
    status=0
    # Without a network: whatever a target makes of its input, it reaches nothing.
    unshare --user --map-root-user --net -- "$CARGO_TARGET_DIR/$triple/release/$target" "${seeds[@]}" \
        -max_total_time="$seconds" -max_len=2048 -rss_limit_mb=2048 -timeout=10 -print_final_stats=1 \
        -use_value_profile=1 -artifact_prefix="$crashes/" >"$log" 2>&1 || status=$?
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
    covered=$(grep -o 'cov: [0-9]*' "$log" | tail -n 1 | cut -d' ' -f2 || true)
    printf '%-16s %10s executions %8s per second, %5s edges covered' \
        "$target" "${runs:-0}" "${rate:-0}" "${covered:-0}"
    if [ "$status" -ne 0 ]; then
        printf '  CRASHED (%s)\n' "$log"
        tail -n 40 "$log" >&2
        failed=1
    elif [ "${runs:-0}" -eq 0 ]; then
        printf '  DID NOT RUN (%s)\n' "$log"
        failed=1
    else
        printf '\n'
    fi
done
exit "$failed"
