# Runs in the guest, before what uses it: calls of the host's kernel through the page that the guest kernel keeps in
# every program (U6). The first argument is that page's address.
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
