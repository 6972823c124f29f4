# Runs in the guest, behind gate.py: asks for memory of the host's in every way that there is (U6).
FREE = 0x2000_0000_0000
SIZE = 512 << 20
PRIVATE, SHARED, FIXED, ANONYMOUS, GROWS, HUGE = 2, 1, 0x10, 0x20, 0x100, 0x40000
NONE = 2**64 - 1


def hold():
    """Keeps what was taken until it has been measured, which the end of the input says."""
    sys.stdin.read()


def memory_of(flags):
    def attack():
        result = call(9, FREE, SIZE, 3, flags | FIXED, NONE, 0)
        if 0 <= result:
            # What is touched is the host's memory.
            ctypes.memset(FREE, 1, SIZE)
            print("touched", SIZE >> 20, "MiB of the host's memory", flush=True)
            hold()
        return result
    return attack


ATTACKS = {
    "memory that grows": memory_of(PRIVATE | ANONYMOUS | GROWS),
    "huge pages": memory_of(PRIVATE | ANONYMOUS | HUGE),
    "private memory": memory_of(PRIVATE | ANONYMOUS),
    "shared memory": memory_of(SHARED | ANONYMOUS),
    "a futex with an owner": lambda: call(202, FREE, 6, 0, 0),
    "a futex with many waiters": lambda: call(202, FREE, 4, 0, 0),
    "more registers": lambda: call(158, 0x1023, 18),
    "a message": lambda: call(47, 0, FREE, 0),
    "to close a descriptor": lambda: call(3, 3),
    "to make a process": lambda: call(57),
}

# To show that the gate works: nothing is there, and to unmap it is allowed.
print("the gate:", call(11, FREE, 4096), flush=True)
for name, attack in ATTACKS.items():
    child = os.fork()
    if child == 0:
        result = attack()
        print("refused:" if result == -errno.EPERM else "answered:", name, result, flush=True)
        os._exit(0)
    os.waitpid(child, 0)


# Guest memory again and again: of all of it, the host makes tables of pages each time.
GUEST_MEMORY, READ, POPULATE, TIMES, WHOLE = 3, 1, 0x8000, 200, 64 << 20
mapped_all, done = os.pipe()
if os.fork() == 0:
    places = range(FREE, FREE + 2 * TIMES * WHOLE, 2 * WHOLE)
    mapped = sum(call(9, at, WHOLE, READ, SHARED | FIXED | POPULATE, GUEST_MEMORY, 0) == at for at in places)
    print("mapped:", mapped, flush=True)
    os.close(done)
    hold()
    os._exit(0)
os.close(done)
os.read(mapped_all, 1)
print("the guest goes on", flush=True)
hold()
os.wait()
