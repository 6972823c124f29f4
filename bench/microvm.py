"""QEMU's leanest machine with hardware virtualization, around the very guest that bathy runs.

The same kernel file, initramfs, command line, disks, memory and processors, and the same agent behind a virtio console
port: what differs is the VMM alone.
"""

import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from agent_port import AgentPort
from peers import DEADLINE_SECONDS, BenchError, first_line

QEMU = "qemu-system-x86_64"
# Nothing of a PC that the guest does not use: no ACPI tables (so the firmware is qboot, not SeaBIOS), no timer, no clock,
# no old interrupt controller, no option ROMs. The serial port is there as it is in bathy's machine.
MACHINE = "microvm,acpi=off,x-option-roms=off,pit=off,pic=off,rtc=off,isa-serial=on,auto-kernel-cmdline=off"
# As crates/vmm/src/boot.rs has it, up to the devices.
KERNEL_WORDS = ("console=ttyS0 quiet reboot=k,panic_warm panic=-1 rdinit=/init no_timer_check tsc=reliable "
                "random.trust_cpu=on 8250.nr_uarts=1 iommu=off")
# QEMU's places for virtio devices are given out from the last to the first.
TRANSPORTS, FIRST_ADDRESS, STEP, FIRST_LINE = 8, 0xFEB0_0000, 0x200, 5
DEVICES = 4
# The name of guest memory that is a file, in /proc/PID/smaps.
RAM = "/memfd:memory-backend-memfd"


@dataclass(frozen=True)
class Guest:
    """What both VMMs run."""

    kernel: Path
    initramfs: Path
    image: Path
    # An empty file system; every guest gets a copy.
    disk: Path
    memory_mib: int
    cpus: int
    processes: int


def processor():
    """All that KVM offers, without what bathy takes out too: counters, machines in the machine, and on a processor that is
    itself emulated by QEMU the extended state, whose description there contradicts itself."""
    emulated = "QEMU TCG CPU" in Path("/proc/cpuinfo").read_text()
    return "host,pmu=off,svm=off,vmx=off" + (",xsave=off,avx=off,avx2=off,fma=off,f16c=off" if emulated else "")


def kernel_line(guest):
    places = [TRANSPORTS - 1 - number for number in range(DEVICES)]
    devices = [f"virtio_mmio.device={STEP}@{FIRST_ADDRESS + place * STEP:#x}:{FIRST_LINE + place}" for place in places]
    return f"{KERNEL_WORDS} {' '.join(devices)} -- threads={guest.processes}"


def arguments(guest, disk, port, console, ram_file=False):
    """The command; `ram_file`: guest memory as a file with a name, so that it can be told from the rest."""
    machine = MACHINE + (",memory-backend=ram" if ram_file else "")
    memory = ["-object", f"memory-backend-memfd,id=ram,size={guest.memory_mib}M"] if ram_file else []
    return [
        QEMU, "-M", machine, "-accel", "kvm", "-cpu", processor(), "-smp", str(guest.cpus),
        "-m", str(guest.memory_mib), *memory,
        "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot",
        "-serial", f"file:{console}",
        "-kernel", str(guest.kernel), "-initrd", str(guest.initramfs), "-append", kernel_line(guest),
        "-drive", f"id=image,file={guest.image},format=raw,if=none,readonly=on,cache=writeback",
        "-device", "virtio-blk-device,drive=image",
        # bathy's disk of a sandbox for one command is thrown away with it: a flush does nothing, a discard gives space back.
        "-drive", f"id=disk,file={disk},format=raw,if=none,cache=unsafe,discard=unmap,aio=threads",
        "-device", "virtio-blk-device,drive=disk",
        "-device", "virtio-serial-device,max_ports=2", "-chardev", f"socket,id=agent,fd={port}",
        "-device", "virtserialport,chardev=agent,name=agent",
        "-device", "virtio-rng-device",
    ]  # fmt: skip


class Running:
    """One guest from its VMM's start to its end."""

    def __init__(self, guest, scratch, ram_file=False):
        self.disk, self.console = scratch / "qemu-disk", scratch / "qemu-console"
        subprocess.run(["cp", "--sparse=always", guest.disk, self.disk], check=True)
        ours, theirs = socket.socketpair()
        ours.settimeout(DEADLINE_SECONDS)
        self.port = AgentPort(ours)
        command = arguments(guest, self.disk, theirs.fileno(), self.console, ram_file)
        with theirs, (scratch / "qemu-log").open("w+") as log:
            self.started = time.time_ns()
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, start_new_session=True)
        self.log = scratch / "qemu-log"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        """Takes it away, as bathy does with a sandbox whose command has ended; returns when it is gone."""
        self.process.kill()
        self.process.wait()
        self.port.socket.close()
        self.disk.unlink(missing_ok=True)

    def attempt(self, action, *parameters):
        """Whatever fails is told with what QEMU and its guest said."""
        try:
            return action(*parameters)
        except BenchError as error:
            said = self.log.read_text(errors="replace") + self.console.read_text(errors="replace")
            raise BenchError(f"QEMU: {error}; it printed:\n{said[-2000:]}") from None


def version():
    if shutil.which(QEMU) is None:
        raise BenchError(f"{QEMU} is missing: apt-get install qemu-system-x86")
    return first_line([QEMU, "--version"])


def start_times(guest, scratch, argv, image_config):
    """Milliseconds from QEMU's start to PID 1, to the agent's answer, to a command's end, and to the end of everything."""
    with Running(guest, scratch) as running:
        ready = running.attempt(running.port.greet)
        running.attempt(running.port.run, argv, image_config)
        answered = time.time_ns()
        # Asked for again now that nothing has to be waited for: this answer knows the time to within its own duration.
        exact = running.attempt(running.port.greet)
        asked = time.time_ns()
        running.end()
        ended = answered + (time.time_ns() - asked)
        moments = {"pid1": exact.pid1, "ready": ready.arrived, "answer": answered, "whole": ended}
        times = {name: (moment - running.started) / 1e6 for name, moment in moments.items()}
        return times | {"greeting": (asked - answered) / 1e6}


def run_in_guest(guest, scratch, argv, image_config, user):
    """What a command prints."""
    with Running(guest, scratch) as running:
        running.attempt(running.port.greet)
        return running.attempt(running.port.run, argv, image_config, user)
