#!/usr/bin/env python3
"""Prints the table of attacks on the network, from the files that the suites leave, and how many rows each number has.

usage: table.py [FOLDER]     default: target/attack-table; of the nested test bed: target/nested/results/attack-table

The exit code is 1 if a row did not hold, if one that has to get through without its defence did not, or if there is none.
"""

import collections
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# Held; got through when the defence was taken away, as it has to.
GOOD = ["held", "through"]


def order(number):
    return number[:1], int(number[1:])


def main():
    target = Path(os.environ.get("CARGO_TARGET_DIR") or REPOSITORY / "target")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else target / "attack-table"
    rows = []
    for file in sorted(folder.glob("*.tsv")):
        rows += [line.split("\t") for line in file.read_text().splitlines()]
    rows.sort(key=lambda row: order(row[0]))
    counts = collections.defaultdict(collections.Counter)
    for number, what, outcome, verdict in rows:
        counts[number][verdict] += 1
        if verdict != "through":
            print(f"{number:3} {what:70.70} {outcome:30.30} {verdict}")
    print(f"\n{'ID':3} {'held':>6} {'of':>6} {'get through without the defence':>33}")
    for number in sorted(counts, key=order):
        count = counts[number]
        tried = count["held"] + count["NOT HELD"]
        open_rows = count["through"] + count["NOT THROUGH"]
        print(f"{number:3} {count['held']:6} {tried:6} {count['through']:26} of {open_rows:3}")
    bad = [row for row in rows if row[3] not in GOOD]
    for row in bad:
        print("bad:", *row)
    return 1 if bad or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
