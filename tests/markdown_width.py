#!/usr/bin/env python3
"""Finds lines of Markdown that are longer than 100 columns.

    tests/markdown_width.py FILE...

Tables and code blocks may be wider, and so may a line that has no place to break it, such as a single long link. Each line
that is too long is printed as FILE:LINE; the exit code is 1 if there is one.
"""
import re
import sys

WIDTH = 100
# What stands before the text of a line: quotes, list markers, marks of headings.
MARKER = re.compile(r"^\s*(?:>\s*)*(?:[-*+]\s+|\d+[.)]\s+|#+\s+)?")
# Code, links and their punctuation are not broken.
WORD = re.compile(r"(?:`[^`]*`|\[[^\]]*\](?:\([^)]*\)|\[[^\]]*\])?|\S)+")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s")


def prose(lines):
    """The numbered lines that are neither tables nor code."""
    fence, before, in_code, in_list = None, "", False, False
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if fence:
            fence = None if text.startswith(fence) else fence
        elif text.startswith(("```", "~~~")):
            fence = text[:3]
        else:
            # A blank line does not end a block of code, and within a list four spaces are a paragraph of an item.
            indented = line.startswith(("    ", "\t")) and not in_list
            in_code = indented and (in_code or not before) if text else in_code
            if text and not in_code and not text.startswith("|"):
                yield number, line
            if ITEM.match(line):
                in_list = True
            elif text and not line.startswith(" "):
                in_list = False
        before = text


def is_too_long(line):
    return len(line) > WIDTH and len(WORD.findall(MARKER.sub("", line))) > 1


def main(paths):
    if not paths:
        print(__doc__, file=sys.stderr)
        return 2
    found = False
    for path in paths:
        with open(path, encoding="utf-8") as file:
            for number, line in prose(file.read().splitlines()):
                if is_too_long(line):
                    print(f"{path}:{number}: {len(line)} columns")
                    found = True
    return int(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
