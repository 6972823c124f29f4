"""Runs in a guest, as root: how fast is its writable disk? Prints JSON: MiB per second, and reads per second.

`cold` is read through the device into an empty page cache, `warm` is the same again, from the guest's own page cache.
Random reads go past the page cache, one at a time.
"""

import json
import mmap
import os
import random
import sys
import time

# On the disk itself, with no other file system in between.
PATH = "/tmp/bench-blocks"
CHUNK = 1 << 20
PAGE = 4096


def main(mebibytes, reads):
    result = {}

    def timed(name, amount, action):
        began = time.monotonic()
        action()
        result[name] = amount / (time.monotonic() - began)

    # Not zeros, which a VMM may recognize.
    data = random.Random(1).randbytes(CHUNK)
    file = os.open(PATH, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def write():
        for _ in range(mebibytes):
            os.write(file, data)
        os.fsync(file)

    buffer = mmap.mmap(-1, CHUNK)

    def read():
        os.lseek(file, 0, os.SEEK_SET)
        total = 0
        while count := os.readv(file, [buffer]):
            total += count
        assert total == mebibytes * CHUNK, total

    timed("write", mebibytes, write)
    with open("/proc/sys/vm/drop_caches", "w") as caches:
        caches.write("3")
    timed("cold read", mebibytes, read)
    timed("warm read", mebibytes, read)
    assert buffer[:] == data

    direct = os.open(PATH, os.O_RDONLY | os.O_DIRECT)
    page = memoryview(buffer)[:PAGE]
    places = random.Random(2).choices(range(mebibytes * CHUNK // PAGE), k=reads)

    def read_pages():
        for place in places:
            assert os.preadv(direct, [page], place * PAGE) == PAGE

    timed("random 4 KiB reads", reads, read_pages)
    print(json.dumps(result))


main(int(sys.argv[1]), int(sys.argv[2]))
