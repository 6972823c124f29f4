"""The contenders: how each runs a command over the same root files."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
# What QEMU's guest prints after the command, see microvm-init.
GUEST_STATUS = "exit status 0\n"
# A start takes seconds at worst (QEMU); beyond this it hangs.
DEADLINE_SECONDS = 90


class BenchError(Exception):
    """Something without which there is no honest comparison."""


@dataclass(frozen=True)
class Command:
    """A command and what it must print."""

    name: str
    argv: list[str]
    prints: str


@dataclass
class Peer:
    """One contender; `prepare(command)` returns the argv that is timed."""

    name: str
    version: str
    prepare: callable
    # Text that a good run prints after the command's own.
    suffix: str = ""
    environment: dict = field(default_factory=lambda: dict(os.environ))

    def accepts(self, command, status, output):
        """Whether a run did what it should have."""
        wanted = command.prints + self.suffix
        # A serial console adds carriage returns and lines of the guest's kernel.
        found = wanted in output.replace("\r", "") if self.suffix else wanted == output
        return status == 0 and found


def first_line(argv):
    """The version that a program tells of itself."""
    output = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return output.splitlines()[0]


def bathy(program):
    """The product, as its users start it."""
    def prepare(command):
        return [str(program), "run", "--", *command.argv]
    return Peer("bathy", first_line([program, "--version"]), prepare)


def runsc(name, program, version, root, scratch, writable):
    """gVisor: systrap, the platform for machines without KVM."""
    counter = iter(range(1_000_000))
    overlay = "root:memory" if writable else "none"
    flags = ["--platform=systrap", "--network=none", "--ignore-cgroups", f"--overlay2={overlay}"]
    if os.geteuid() != 0:
        flags.append("--rootless")

    def prepare(command):
        bundle = scratch / f"{name}-{command.name}"
        if not bundle.exists():
            bundle.mkdir()
            (bundle / "config.json").write_text(json.dumps(bundle_config(command, root, writable)))
        container = f"{name}-{os.getpid()}-{next(counter)}"
        return [str(program), f"--root={scratch / 'containers'}", *flags, "run", "--bundle", str(bundle), container]
    return Peer(name, version, prepare)


def bundle_config(command, root, writable):
    """An OCI description with no more than the command needs."""
    def mount(kind, target):
        return {"type": kind, "source": kind, "destination": target}
    return {
        "ociVersion": "1.0.0",
        "process": {
            "args": command.argv,
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "cwd": "/",
            "user": {"uid": 0, "gid": 0},
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": not writable},
        "mounts": [mount("proc", "/proc"), mount("tmpfs", "/dev"), mount("tmpfs", "/tmp")],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }


def bubblewrap(root):
    """Namespaces only: the host's kernel serves every system call; root read-only."""
    # Found here: the command's own PATH is not where to look.
    program = shutil.which("bwrap")

    def prepare(command):
        return [program, "--unshare-all", "--die-with-parent", "--ro-bind", str(root), "/",
                "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *command.argv]
    return Peer("bubblewrap", first_line([program, "--version"]), prepare, environment=ENVIRONMENT)


def microvm(folder, image):
    """QEMU's leanest machine, every instruction translated (TCG)."""
    # Debian's kernel finds no clock in this machine to measure the time stamp
    # counter with, and waits forever; TCG passes the host's counter through.
    clock = re.search(r"^cpu MHz\s*: ([0-9.]+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if clock is None:
        raise BenchError("/proc/cpuinfo tells no clock rate, QEMU's guest needs one")
    kernel_options = f"console=ttyS0 quiet tsc=reliable tsc_early_khz={round(float(clock[1]) * 1000)}"

    def prepare(command):
        return ["qemu-system-x86_64", "-M", "microvm,x-option-roms=off,pit=off,pic=off,rtc=on",
                "-accel", "tcg", "-cpu", "max", "-m", "512", "-nodefaults", "-no-user-config",
                "-display", "none", "-serial", "stdio", "-no-reboot",
                "-kernel", str(folder / "vmlinuz"), "-initrd", str(folder / "initrd"),
                "-append", f"{kernel_options} -- {' '.join(command.argv)}",
                "-drive", f"id=root,file={image},format=raw,if=none,readonly=on",
                "-device", "virtio-blk-device,drive=root"]
    return Peer("qemu-tcg", first_line(["qemu-system-x86_64", "--version"]), prepare, suffix=GUEST_STATUS)


def share_root(image, digest, cache, scratch, cleanup):
    """The image's files as a folder: mounted where that is allowed, else unpacked once."""
    if os.geteuid() == 0:
        target = scratch / "root"
        target.mkdir()
        mounted = subprocess.run(["mount", "-t", "erofs", "-o", "loop,ro", image, target],
                                 capture_output=True, check=False)
        if mounted.returncode == 0:
            cleanup.callback(subprocess.run, ["umount", "--lazy", target], check=True)
            return target
    target = cache / f"root-{digest[:20]}"
    if not target.exists():
        unpacked = scratch / "unpacked"
        command = ["fsck.erofs", f"--extract={unpacked}", "--no-preserve", image]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            shutil.rmtree(unpacked, ignore_errors=True)
            raise BenchError(f"cannot unpack {image}: {(result.stdout + result.stderr).strip()[-500:]}")
        unpacked.rename(target)
    return target
