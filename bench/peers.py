"""The contenders: how each runs a command over the same root files."""

import json
import os
import re
import shutil
import subprocess
import time
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


# What a container does that only is there. bathy needs none: its sandboxes run without a command.
IDLE = Command("idle", ["/bin/sleep", "infinity"], "")


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


def bathy(program, state, name="bathy"):
    """The product, as its users start it."""
    def prepare(command):
        return [str(program), "run", "--", *command.argv]
    return Peer(name, first_line([program, "--version"]), prepare, environment=with_state(state))


def bathy_exec(program, state, sandbox, name="bathy"):
    """Commands in a sandbox that runs."""
    def prepare(command):
        return [str(program), "exec", sandbox, "--", *command.argv]
    return Peer(name, first_line([program, "--version"]), prepare, environment=with_state(state))


def with_state(state):
    """Our environment, with a state folder of the benchmark's own: the user's sandboxes and records stay out of it."""
    return {**os.environ, "XDG_STATE_HOME": str(state)}


class Containers:
    """A runtime of the OCI kind and its containers over the root files."""

    def __init__(self, name, version, program, flags, root, scratch, writable=False):
        self.name, self.version, self.root, self.scratch, self.writable = name, version, root, scratch, writable
        # Where it keeps its containers is also how the processes of this run are told from others.
        self.state = scratch / f"containers-{name}"
        self.call = [str(program), f"--root={self.state}", *flags]
        self.counter = iter(range(1_000_000))

    def cold_start(self):
        """A new container for each command."""
        def prepare(command):
            return [*self.call, "run", "--bundle", str(self.bundle(command)), self.new_name()]
        return Peer(self.name, self.version, prepare)

    def in_running(self, cleanup):
        """Commands in one container that runs."""
        container = self.start_idle(cleanup)

        def prepare(command):
            return [*self.call, "exec", container, *command.argv]
        return Peer(self.name, self.version, prepare)

    def start_idle(self, cleanup):
        """A container that does nothing until `cleanup`; its name."""
        container, bundle = self.new_name(), self.bundle(IDLE)
        cleanup.callback(subprocess.run, [*self.call, "delete", "--force", container], stdin=subprocess.DEVNULL,
                         capture_output=True, check=False, timeout=DEADLINE_SECONDS)
        # It must not hold a pipe of ours open for as long as it runs.
        with (self.scratch / f"{container}.log").open("w+") as errors:
            done = subprocess.run([*self.call, "run", "--detach", "--bundle", str(bundle), container],
                                  stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, check=False,
                                  timeout=DEADLINE_SECONDS)
            if done.returncode != 0:
                errors.seek(0)
                raise BenchError(f"{self.name} does not start; it printed:\n{errors.read()[-2000:]}")
        return container

    def new_name(self):
        return f"{self.name}-{os.getpid()}-{next(self.counter)}"

    def bundle(self, command):
        bundle = self.scratch / f"{self.name}-{command.name}"
        if not bundle.exists():
            bundle.mkdir()
            (bundle / "config.json").write_text(json.dumps(bundle_config(command, self.root, self.writable)))
        return bundle


def runsc(name, program, version, root, scratch, writable):
    """gVisor: systrap, the platform for machines without KVM."""
    flags = ["--platform=systrap", "--network=none", "--ignore-cgroups",
             f"--overlay2={'root:memory' if writable else 'none'}"]
    if os.geteuid() != 0:
        flags.append("--rootless")
    return Containers(name, f"runsc {version}", program, flags, root, scratch, writable)


def runc(program, version, root, scratch):
    """The host's kernel: what `docker exec` and `podman exec` come to, without what those add. Only for root."""
    return Containers("runc", f"runc {version}", program, [], root, scratch)


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
    def prepare(command):
        return [*bubble(root), *command.argv]
    return Peer("bubblewrap", first_line([bubble(root)[0], "--version"]), prepare, environment=ENVIRONMENT)


def bubble(root):
    # Found here: the command's own PATH is not where to look.
    return [shutil.which("bwrap"), "--unshare-all", "--die-with-parent", "--ro-bind", str(root), "/",
            "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]


def nsenter(root, cleanup):
    """Commands in the namespaces of a bubblewrap sandbox that runs: what entering alone costs, no boundary of a kernel's."""
    ready, told = os.pipe()
    sandbox = subprocess.Popen([*bubble(root), "--info-fd", str(told), *IDLE.argv], env=ENVIRONMENT, pass_fds=[told],
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    cleanup.callback(sandbox.wait)
    cleanup.callback(sandbox.kill)
    os.close(told)
    with os.fdopen(ready) as info:
        child = json.load(info)["child-pid"]
    program = shutil.which("nsenter")
    flags = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    # PID 1 is bubblewrap itself, which has its root in place before it starts the command.
    wait_until(lambda: Path(f"/proc/{child}/task/{child}/children").read_text().strip(), "bubblewrap does not start")

    def prepare(command):
        return [program, f"--target={child}", *flags, "--mount", "--pid", "--net", "--ipc", "--uts", "--root", "--wd=/",
                *command.argv]
    return Peer("nsenter", first_line([program, "--version"]), prepare, environment=ENVIRONMENT)


def plain():
    """No sandbox at all: what it costs to start a program and wait for its end."""
    return Peer("plain", f"Linux {os.uname().release}", lambda command: list(command.argv), environment=ENVIRONMENT)


def wait_until(holds, failure, seconds=10):
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise BenchError(failure)
        time.sleep(0.005)


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
