"""Ends with an error unless /dev/kvm runs guest code at the speed of the processor below it.

A KVM without hardware underneath opens, too, and interprets about a million instructions a second. The guest here counts
down from ten millions and halts. This knows nothing of the product: it is what the product's own probe is compared with.
"""

import ctypes
import fcntl
import mmap
import os
import signal
import struct
import sys
import time

LOOPS = 10_000_000
PATIENCE_SECONDS = 4
CREATE_VM, CREATE_VCPU, GET_VCPU_MMAP_SIZE, RUN = 0xAE01, 0xAE41, 0xAE04, 0xAE80
SET_USER_MEMORY_REGION = 0x4020AE46
GET_SREGS, SET_SREGS, SET_REGS = 0x8138AE83, 0x4138AE84, 0x4090AE82
EXIT_HLT = 5
CODE_ADDRESS = 0x1000
# mov ecx, LOOPS; again: dec ecx; jnz again; hlt. In 16-bit code, hence the operand-size prefixes.
CODE = b"\x66\xb9" + struct.pack("<I", LOOPS) + b"\x66\x49" + b"\x75\xfc" + b"\xf4"


def run_guest():
    kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    vm = fcntl.ioctl(kvm, CREATE_VM, 0)
    memory = mmap.mmap(-1, 0x4000)
    memory[CODE_ADDRESS : CODE_ADDRESS + len(CODE)] = CODE
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fcntl.ioctl(vm, SET_USER_MEMORY_REGION, struct.pack("=IIQQQ", 0, 0, 0, len(memory), address))
    vcpu = fcntl.ioctl(vm, CREATE_VCPU, 0)
    run = mmap.mmap(vcpu, fcntl.ioctl(kvm, GET_VCPU_MMAP_SIZE, 0))
    special = bytearray(fcntl.ioctl(vcpu, GET_SREGS, bytes(0x138)))
    # The code segment comes first: its base and its selector become zero.
    special[0:8] = bytes(8)
    special[12:14] = bytes(2)
    fcntl.ioctl(vcpu, SET_SREGS, bytes(special))
    # Sixteen general registers, the instruction pointer, and the flags with the bit that is always set.
    fcntl.ioctl(vcpu, SET_REGS, struct.pack("=16QQQ", *[0] * 16, CODE_ADDRESS, 2))
    began = time.monotonic()
    fcntl.ioctl(vcpu, RUN, 0)
    took = time.monotonic() - began
    reason = struct.unpack_from("=I", run, 8)[0]
    if reason != EXIT_HLT:
        sys.exit(f"the check's guest ended with KVM exit {reason} instead of a halt")
    return took


def too_slow(_number, _frame):
    sys.exit(
        f"/dev/kvm of the outer Linux is not hardware-like: {2 * LOOPS} guest instructions took more than "
        f"{PATIENCE_SECONDS} s. Are other programs using all processors?"
    )


def main():
    if not os.path.exists("/dev/kvm"):
        sys.exit("there is no /dev/kvm in the outer Linux: its emulated processor has no SVM, or kvm-amd did not load")
    # The signal interrupts the call that runs the guest.
    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(PATIENCE_SECONDS)
    took = run_guest()
    print(f"bed: KVM ran {2 * LOOPS} guest instructions in {took:.3f} s")


main()
