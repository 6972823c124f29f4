"""Runs Rust test programs in the outer Linux, one process for each test: a line a test, a line a suite, and files of both.

usage: run_tests.py PLAN RESULTS
PLAN is a list of suites: a program, the folder to run it in, and optionally
  only      names: of the tests, those that contain one of these ("*" is any)
  skip      names: not those that contain one of these
  timeout   seconds for each test
  alone     true: one test at a time; otherwise as many as there are processors
RESULTS gets results.json and the output of each test that failed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

TIMEOUT_SECONDS = 120
SHOWN_LINES = 30
NO_END = "no end"
SUMMARY = re.compile(rb"^test result: (?:ok|FAILED)\. (\d+) passed; (\d+) failed; (\d+) ignored;", re.MULTILINE)


def tests_of(suite):
    listed = subprocess.run(
        [suite["program"], "--list", "--format", "terse"], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    names = [line.removesuffix(": test") for line in listed if line.endswith(": test")]
    for wanted in suite.get("only", ["*"]) + suite.get("skip", []):
        # A name that no test has would silently test nothing.
        if not any(contains(name, wanted) for name in names):
            sys.exit(f"run_tests: no test of {suite['name']} is called {wanted!r}")
    only, skip = suite.get("only", ["*"]), suite.get("skip", [])
    chosen = [name for name in names if any(contains(name, part) for part in only)]
    return [name for name in chosen if not any(contains(name, part) for part in skip)]


def contains(name, part):
    return part == "*" or part in name


def end_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_test(suite, name, log):
    """One test in a process group of its own: how it ended."""
    command = [suite["program"], "--exact", name, "--nocapture", "--test-threads=1"]
    limit = suite.get("timeout", TIMEOUT_SECONDS)
    environment = dict(os.environ, CARGO_MANIFEST_DIR=suite["folder"])
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, cwd=suite["folder"], env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        # Also what a test that has ended left behind.
        end_group(process)
    if code is None:
        return f"{NO_END} after {limit} s"
    counts = SUMMARY.findall(log.read_bytes())
    if code == 0 and counts and counts[-1] == (b"1", b"0", b"0"):
        return "passed"
    if code == 0 and counts and counts[-1] == (b"0", b"0", b"1"):
        return "ignored"
    return f"exit code {code}"


def timed(suite, name, log):
    """Guests hang now and then in this emulation: a test that does not end has one more try, and that is told."""
    began = time.monotonic()
    outcome = run_test(suite, name, log)
    hung = outcome.startswith(NO_END)
    if hung:
        print(f"HUNG {time.monotonic() - began:7.1f} s  {suite['name']} {name}; once more", flush=True)
        outcome = run_test(suite, name, log)
    return {"name": name, "outcome": outcome, "hung": hung, "seconds": round(time.monotonic() - began, 2)}


def report(suite, test, log):
    word = {"passed": "pass", "ignored": "skip"}.get(test["outcome"], "FAIL")
    print(f"{word} {test['seconds']:7.1f} s  {suite['name']} {test['name']}", flush=True)
    if word != "FAIL":
        log.unlink()
        return
    print(f"  {test['outcome']}; the end of its output:")
    for line in log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]:
        print(f"    {line}")


def run_suite(suite, results):
    began = time.monotonic()
    tests = []
    at_once = 1 if suite.get("alone") else os.cpu_count()
    with ThreadPoolExecutor(at_once) as pool:
        running = {}
        for name in tests_of(suite):
            log = results / f"{suite['name']}-{name.replace('::', '.')}.log"
            running[pool.submit(timed, suite, name, log)] = log
        for future in as_completed(running):
            tests.append(future.result())
            report(suite, tests[-1], running[future])
    counts = count(tests) | {"seconds": round(time.monotonic() - began, 1)}
    return {"suite": suite["name"], "tests": tests} | counts


def count(tests):
    passed = sum(test["outcome"] == "passed" for test in tests)
    ignored = sum(test["outcome"] == "ignored" for test in tests)
    hung = sum(test["hung"] for test in tests)
    return {"passed": passed, "failed": len(tests) - passed - ignored, "ignored": ignored, "hung": hung}


def summary(name, counts):
    ignored = f", {counts['ignored']} ignored" if counts["ignored"] else ""
    hung = f", {counts['hung']} hung at first" if counts["hung"] else ""
    return f"{name}: {counts['passed']} passed, {counts['failed']} failed{ignored}{hung}, {counts['seconds']:.0f} s"


def main():
    plan, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results.mkdir(exist_ok=True)
    engine = os.environ.get("BATHY_ENGINE", "auto")
    # Before the first test runs: a mistake in the plan should not cost an hour.
    for suite in plan:
        tests_of(suite)
    done = []
    for suite in plan:
        done.append(run_suite(suite, results))
        # After each suite, so that an end by the clock leaves what was found until then.
        (results / "results.json").write_text(json.dumps({"engine": engine, "suites": done}, indent=1))
    total = count([test for suite in done for test in suite["tests"]])
    total["seconds"] = sum(suite["seconds"] for suite in done)
    lines = [summary(f"{suite['suite']} ({engine})", suite) for suite in done]
    lines.append(summary(f"all ({engine})", total))
    (results / "summary.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 1 if total["failed"] or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
