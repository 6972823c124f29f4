# Runs in the guest, behind gate.py: maps one page of guest memory in each gigabyte, in several processes. Each costs the
# host a page of tables (U6).
GUEST_MEMORY, READ, SHARED, FIXED, POPULATE = 3, 1, 1, 0x10, 0x8000
FREE, PLACES, PROCESSES = 0x1000_0000_0000, 65_000, 8

if os.getuid() == 0:
    os.setgid(1000)
    os.setuid(1000)
print("begin", flush=True)
ended, ends = os.pipe()
for _ in range(PROCESSES):
    if os.fork() == 0:
        places = range(FREE, FREE + (PLACES << 30), 1 << 30)
        mapped = sum(call(9, at, 4096, READ, SHARED | FIXED | POPULATE, GUEST_MEMORY, 0) == at for at in places)
        print("mapped:", mapped, flush=True)
        os.close(ends)
        sys.stdin.read()
        os._exit(0)
os.close(ends)
# Each process has its end of the pipe until it has mapped all.
os.read(ended, 1)
print("all is mapped", flush=True)
sys.stdin.read()
