# Runs in the guest: tries to have code where the jail's filter takes calls for the guest kernel's (U11).
# Arguments: start and end of that range, and the address of the stub's page.
import ctypes
import mmap
import os
import stat
import struct
import sys

START, END, STUB = (int(word, 16) for word in sys.argv[1:])
PAGE = 4096
READ, WRITE, EXECUTE = 1, 2, 4
SHARED, PRIVATE, FIXED, ANONYMOUS, LOW, POPULATE, NO_REPLACE = 1, 2, 0x10, 0x20, 0x40, 0x8000, 0x100000
MAY_MOVE, MOVE_FIXED = 1, 2
libc = ctypes.CDLL(None, use_errno=True)
for name in ("mmap", "mremap", "shmat"):
    getattr(libc, name).restype = ctypes.c_ulong
NOTHING = 2**64 - 1


def arguments(*values):
    return [ctypes.c_ulong(value) for value in values]


def map_at(address, size=PAGE, flags=FIXED, rights=READ | WRITE | EXECUTE):
    return libc.mmap(*arguments(address, size, rights, PRIVATE | ANONYMOUS | flags, NOTHING, 0))


def inside(address, size=PAGE):
    return address != NOTHING and address < END and START < address + size


def fixed():
    addresses = [START, START + PAGE, (START + END) // 2 & -PAGE, END - PAGE]
    return any(map_at(address, flags=flags) != NOTHING for address in addresses for flags in (FIXED, FIXED | NO_REPLACE))


def overlapping():
    return map_at(START - PAGE, 2 * PAGE) != NOTHING or map_at(END - PAGE, 2 * PAGE) != NOTHING


def hinted():
    return any(inside(map_at(address, flags=flags)) for address in range(START, END, 1 << 20) for flags in (0, LOW))


def hunted():
    # Everything in the lower half of what MAP_32BIT would give, and then some.
    size = 1 << 20
    for _ in range(2048):
        address = map_at(0, size, flags=LOW, rights=0)
        if address == NOTHING:
            break
        if inside(address, size):
            return True
    return False


def unmapped():
    return any(
        libc.munmap(*arguments(start, end - start)) == 0
        for start, end in [(START, END), (START, START + PAGE), (END - PAGE, END), (START - PAGE, END + PAGE)]
    )


def moved_away():
    free = map_at(0, END - START, flags=0, rights=0)
    moves = [(END - START, END - START), (PAGE, PAGE), (END - START, PAGE), (END - START, END - START + PAGE)]
    return any(
        libc.mremap(*arguments(START, old, new, MAY_MOVE | flags, free)) != NOTHING
        for old, new in moves for flags in (0, MOVE_FIXED)
    )


def moved_in():
    page = map_at(0, flags=0)
    return libc.mremap(*arguments(page, PAGE, PAGE, MAY_MOVE | MOVE_FIXED, START + PAGE)) != NOTHING


def grown_in():
    page = map_at(START - PAGE)
    return page != START - PAGE or libc.mremap(*arguments(page, PAGE, 2 * PAGE, 0, 0)) != NOTHING


def protected():
    return any(libc.mprotect(*arguments(START, size, READ | WRITE | EXECUTE)) == 0 for size in (PAGE, END - START))


def attached():
    segment = libc.shmget(0, PAGE, 0o1700)
    REMAP, WITH_CODE = 0o40000, 0o100000
    return segment >= 0 and libc.shmat(segment, ctypes.c_void_p(START), REMAP | WITH_CODE) != NOTHING


def left_out():
    """Has the range left out of a fork, and code there in the child."""
    DONTFORK = 10
    for start, size in [(START, END - START), (START, PAGE), (END - PAGE, PAGE)]:
        libc.madvise(*arguments(start, size), DONTFORK)
    child = os.fork()
    if child == 0:
        place = map_at(START + PAGE)
        if place == START + PAGE:
            ctypes.memmove(place, b"\xb8\x2a\x00\x00\x00\xc3", 6)
            os._exit(ctypes.CFUNCTYPE(ctypes.c_int)(place)())
        os._exit(1)
    # Killed when it touches the page is not refused: only the filter held.
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 1


def written():
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(START + PAGE)
        try:
            return memory.write(b"\x0f\x05\xc3") > 0
        except OSError:
            return False


def program(base):
    """A program at this address that makes one system call: it exits with 42."""
    code = bytes.fromhex("bf2a000000" "b8e7000000" "0f05")
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + 120, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    return header + struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, 120 + len(code), 120 + len(code), PAGE) + code


def exit_of(base):
    path = "/tmp/program-%x" % base
    with open(path, "wb") as file:
        file.write(program(base))
    os.chmod(path, stat.S_IRWXU)
    child = os.fork()
    if child == 0:
        try:
            os.execv(path, [path])
        except OSError:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def linked():
    return any(exit_of(base) == 42 for base in (START, START + PAGE, END - PAGE))


# As in stub.py: rdi points to number, six arguments, gate.
JUMP = bytes.fromhex("488b07" "488b7710" "488b5718" "4c8b5720" "4c8b4728" "4c8b4f30" "488b4f38" "488b7f08" "ffe1")
gate = STUB + ctypes.string_at(STUB, PAGE).index(b"\x0f\x05\xc3")
code = mmap.mmap(-1, PAGE, prot=READ | WRITE | EXECUTE)
code.write(JUMP)
call_at = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
GUEST_MEMORY = 3


def through_the_stub(address, size=PAGE):
    words = (ctypes.c_ulong * 8)(9, address, size, READ | EXECUTE, SHARED | FIXED | POPULATE, GUEST_MEMORY, 0, gate)
    return call_at(ctypes.addressof(words)) == address


def in_child(attack):
    """What the attack says, or that its process was killed."""
    child = os.fork()
    if child == 0:
        os._exit(10 + bool(attack()))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {10: "refused", 11: "DONE"}.get(code, "killed" if code < 0 else "strange")


ATTACKS = [fixed, overlapping, hinted, hunted, unmapped, moved_away, moved_in, grown_in, protected, attached, left_out, written,
           linked]
STUBS = {"the first page": (START, PAGE), "the last page": (END - PAGE, PAGE), "from below": (START - PAGE, 2 * PAGE)}

print("a program elsewhere:", exit_of(END), flush=True)
print("elsewhere, through the stub:", in_child(lambda: through_the_stub(0x2000_0000_0000)), flush=True)
for attack in ATTACKS:
    print("%s: %s" % (in_child(attack), attack.__name__), flush=True)
for name, place in STUBS.items():
    print("%s: through the stub, %s" % (in_child(lambda: through_the_stub(*place)), name), flush=True)
print("the guest goes on", flush=True)
