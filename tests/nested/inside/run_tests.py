"""Runs Rust test programs in the outer Linux, one at a time, one process for each test, and prints a line for each.

usage: run_tests.py PLAN CLAIMS RESULTS
PLAN is a list of suites: a program, the folder to run it in, and optionally
  only      names: of the tests, those that contain one of these ("*" is any)
  skip      names: not those that contain one of these
  timeout   seconds for each test
Several machines may do so at the same time: each test is run by the one that claims it first.
RESULTS gets a results-MACHINE.json and the output of each test that failed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

TIMEOUT_SECONDS = 120
SHOWN_LINES = 30
LOCKUP = re.compile(rb"BUG: soft lockup|rcu_\w+ detected stalls|rcu_\w+ self-detected stall")
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
        return f"no end after {limit} s"
    counts = SUMMARY.findall(log.read_bytes())
    if code == 0 and counts and counts[-1] == (b"1", b"0", b"0"):
        return "passed"
    if code == 0 and counts and counts[-1] == (b"0", b"0", b"1"):
        return "ignored"
    return f"exit code {code}"


def lockups():
    """How often the kernel has noticed that one of its processors stood still."""
    log = subprocess.run(["dmesg"], capture_output=True, check=True).stdout
    return len(LOCKUP.findall(log))


def timed(suite, name, log):
    """A guest cannot make a processor of the hardware stand still, but it can one of the emulated ones, now and then: a
    test that fails while the kernel has noticed that has one more try, and that is told."""
    began, before = time.monotonic(), lockups()
    outcome = run_test(suite, name, log)
    hung = outcome != "passed" and lockups() > before
    if hung:
        print(f"HUNG {time.monotonic() - began:7.1f} s  {suite['name']} {name}; once more", flush=True)
        outcome = run_test(suite, name, log)
    seconds = round(time.monotonic() - began, 2)
    return {"suite": suite["name"], "name": name, "outcome": outcome, "hung": hung, "seconds": seconds}


def report(suite, test, log):
    word = {"passed": "pass", "ignored": "skip"}.get(test["outcome"], "FAIL")
    print(f"{word} {test['seconds']:7.1f} s  {suite['name']} {test['name']}", flush=True)
    if word != "FAIL":
        log.unlink()
        return
    print(f"  {test['outcome']}; the end of its output:")
    for line in log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]:
        print(f"    {line}")


def file_name(suite, test):
    return f"{suite}-{test.replace('::', '.')}"


def claim(claims, machine, suite, name):
    """Whether this machine is the one that runs this test. Nobody else can make the same link, on whichever machine."""
    try:
        (claims / file_name(suite["name"], name)).symlink_to(machine)
    except FileExistsError:
        return False
    return True


def give_back(claims, machine, done):
    """What an earlier life of this machine began and did not finish is free again."""
    finished = {file_name(test["suite"], test["name"]) for test in done}
    for link in claims.iterdir():
        if os.readlink(link) == machine and link.name not in finished:
            link.unlink()


def main():
    plan, claims, results = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Path(sys.argv[3])
    machine = os.environ["machine"]
    results.mkdir(exist_ok=True)
    file = results / f"results-{machine}.json"
    done = json.loads(file.read_text())["tests"] if file.exists() else []
    give_back(claims, machine, done)
    # Before the first test runs: a mistake in the plan should not cost an hour.
    listed = [(suite, tests_of(suite)) for suite in plan]
    for suite, names in listed:
        for name in names:
            if not claim(claims, machine, suite, name):
                continue
            log = results / f"{file_name(suite['name'], name)}.log"
            done.append(timed(suite, name, log))
            report(suite, done[-1], log)
            # After each test, so that an end by the clock leaves what was found until then.
            file.write_text(json.dumps({"engine": os.environ.get("BATHY_ENGINE", "auto"), "tests": done}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
