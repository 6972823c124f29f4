#!/usr/bin/env python3
"""Prints how long each test suite took in the last run, from the report that nextest leaves.

    tests/suite_times.py JUNIT.XML

Tests run beside each other, so the sums are more than the time that passed.
"""
import sys
import xml.etree.ElementTree as xml

# The others are short.
SHOWN = 15


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    suites = []
    for suite in xml.parse(sys.argv[1]).getroot().iter("testsuite"):
        cases = [(float(case.get("time", 0)), case.get("name", "")) for case in suite.iter("testcase")]
        if cases:
            suites.append((sum(time for time, _ in cases), suite.get("name", ""), len(cases), max(cases)))
    suites.sort(reverse=True)
    print(f"{'suite':32} {'tests':>5} {'seconds':>8}  slowest")
    for total, name, count, (time, slowest) in suites[:SHOWN]:
        print(f"{name:32} {count:5} {total:8.1f}  {time:.1f} {slowest}")
    rest = suites[SHOWN:]
    if rest:
        print(f"{f'{len(rest)} others':32} {sum(s[2] for s in rest):5} {sum(s[0] for s in rest):8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
