"""The side where everybody else is. Started by world.py in a network namespace of its own: outside.py FOLDER."""

import os
import sys

import cable
import serve


def main():
    print("here", flush=True)
    # Not through Python's buffer: what follows the line belongs to the servers.
    if os.read(sys.stdin.fileno(), 1):
        cable.ip(cable.OUTSIDE)
        serve.run("outside", sys.argv[1])


if __name__ == "__main__":
    main()
