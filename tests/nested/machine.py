"""The outer Linux: a QEMU that emulates a processor with SVM all by itself, and the daemon that shares folders with it.

Both end with this process, also if it is killed.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
# What makes the outer root: this machine's own programs and settings. Its homes, devices and temporary files stay out.
SYSTEM_FOLDERS = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/opt"]
SETTINGS = "/etc"
FILES_OF_A_RUN = ["stdout", "stderr", "exit-code", "bed-error", "console.log"]
# A guest that keeps a processor for this long does not give it back.
STUCK_SECONDS = 90
# All emulated processors count the host's ticks: their counters agree, though Linux cannot know it.
KERNEL_LINE = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off no_timer_check tsc=reliable"


class BedError(Exception):
    """The bed itself failed, not what was run in it."""


class Size(NamedTuple):
    """What the outer Linux sees of a machine. Memory is in MiB."""

    cpu: str
    processors: int
    memory: int


def ends_with_us(command):
    return ["setpriv", "--pdeathsig", "KILL", "--", *command]


class HungError(BedError):
    """The outer Linux says that one of its processors hangs: seldom, and no fault of what runs in it."""


def end(process):
    """Ends one process that this program started, and waits for it."""
    if process and process.poll() is None:
        process.kill()
    if process:
        process.wait()


def clear(work):
    """Not recursively: should a mount be left in there by some mistake, then nothing below it is lost."""
    for remove, name in [(os.unlink, "socket"), (os.rmdir, "tree"), (os.rmdir, ".")]:
        try:
            remove(os.path.normpath(work / name))
        except OSError:
            pass


class Forwarder:
    """Copies what a file grows by to a stream: whole lines, because several machines may have the same stream."""

    def __init__(self, path, stream):
        self.path, self.stream, self.file, self.rest = path, stream, None, b""

    def copy(self, all_of_it=False):
        if self.file is None and self.path.exists():
            self.file = open(self.path, "rb")
        text = self.rest + (self.file.read() if self.file else b"")
        end = len(text) if all_of_it else text.rfind(b"\n") + 1
        self.rest = text[end:]
        self.stream.write(text[:end])
        self.stream.flush()


class Machine:
    """What is booted, with what in it. All machines of a run share one folder; each has one of its own in there."""

    def __init__(self, boot, shared, name, size):
        self.boot, self.shared, self.name, self.size = Path(boot), Path(shared), name, size
        self.out = self.shared / name
        self.share_daemon = self.qemu = self.work = None
        self.show, self.layer = list(SYSTEM_FOLDERS), []
        # A writable layer opens what is below it with O_NOATIME, which the host grants only to root and to owners.
        (self.layer if os.geteuid() == 0 else self.show).append(SETTINGS)

    def share(self, folder, writable=False):
        """Shows a folder of this machine at the same place inside, where what is written stays in memory."""
        (self.layer if writable else self.show).append(str(folder))

    def start(self, job):
        """Boots, and runs the job there: a bash script. Whoever starts a machine ends it, whatever happens meanwhile."""
        self.out.mkdir(exist_ok=True)
        for name in FILES_OF_A_RUN:
            (self.out / name).unlink(missing_ok=True)
        (self.out / "job").write_text(job)
        self.streams = [
            Forwarder(self.out / "stdout", sys.stdout.buffer),
            Forwarder(self.out / "stderr", sys.stderr.buffer),
        ]
        self.work = Path(tempfile.mkdtemp(prefix="bathy-nested-"))
        self.share_daemon = self.start_share(self.work)
        self.qemu = self.start_qemu(self.work)

    def end(self):
        """Ends the machine, if it has not ended, and what served it."""
        end(self.qemu)
        end(self.share_daemon)
        if self.work:
            clear(self.work)
        self.share_daemon = self.qemu = self.work = None

    def start_share(self, work):
        tree, socket = work / "tree", work / "socket"
        tree.mkdir()
        plan = {"bed": str(HERE / "inside"), "out": str(self.shared), "show": self.show, "layer": self.layer}
        # An ordinary user becomes root of a user namespace: it may mount there, and nothing else.
        own_user = [] if os.geteuid() == 0 else ["--map-root-user"]
        command = ["unshare", "--mount", *own_user, "--", sys.executable, str(HERE / "share.py")]
        command += [str(tree), str(socket), json.dumps(plan)]
        with open(self.out / "share.log", "wb") as log:
            share = subprocess.Popen(ends_with_us(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + 20
        while not socket.exists():
            if share.poll() is not None or time.monotonic() > until:
                end(share)
                raise BedError(f"the host's folders cannot be shared:\n{tail(self.out / 'share.log')}")
            time.sleep(0.01)
        return share

    def start_qemu(self, work):
        # An ordinary user cannot show who owns a file: what should run as root would run as nobody.
        share_options = "suid" if os.geteuid() == 0 else "nosuid"
        command = [
            # Ours; the firmware is Debian's.
            *(str(self.boot / "qemu"), "-L", "/usr/share/qemu", "-L", "/usr/share/seabios"),
            # With a thread for each of its processors, guests that work hard crash in it now and then.
            *("-accel", "tcg,thread=single,tb-size=512", "-cpu", self.size.cpu, "-smp", str(self.size.processors)),
            *("-machine", "q35,memory-backend=memory,hpet=off", "-m", str(self.size.memory)),
            # The daemon reads and writes the guest's memory, so it has to be shared.
            *("-object", f"memory-backend-memfd,id=memory,size={self.size.memory}M,share=on"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-no-reboot"),
            *("-serial", f"file:{self.out / 'console.log'}"),
            *("-chardev", f"socket,id=share,path={work / 'socket'}"),
            *("-device", "vhost-user-fs-pci,chardev=share,tag=share,queue-size=1024"),
            *("-kernel", str(self.boot / "vmlinuz"), "-initrd", str(self.boot / "initramfs")),
            *("-append", f"{KERNEL_LINE} share_options={share_options} machine={self.name}"),
        ]
        with open(self.out / "qemu.log", "wb") as log:
            return subprocess.Popen(ends_with_us(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def poll(self):
        """Shows what the job wrote meanwhile. Its exit code, if it has ended."""
        ended = self.qemu.poll() is not None
        for stream in self.streams:
            stream.copy(all_of_it=ended)
        if ended:
            return self.exit_code()
        if (stuck := self.hung()) is not None:
            raise HungError(stuck)
        return None

    def last_words(self):
        return tail(self.out / "console.log")

    def hung(self):
        """The outer kernel's complaint about a processor that has been stuck for long, if there is one."""
        console = self.out / "console.log"
        text = console.read_text(errors="replace") if console.exists() else ""
        found = re.findall(r"soft lockup - CPU#\d+ stuck for (\d+)s![^\n]*", text)
        return next((f"a processor is stuck for {time} s" for time in found if int(time) >= STUCK_SECONDS), None)

    def exit_code(self):
        error = self.out / "bed-error"
        if error.exists():
            raise BedError(f"{error.read_text().strip()}\n{tail(self.out / 'console.log')}")
        try:
            return int((self.out / "exit-code").read_text())
        except (FileNotFoundError, ValueError):
            said = tail(self.out / "qemu.log") + tail(self.out / "console.log")
            raise BedError(f"the outer Linux ended before its job did:\n{said}") from None


def tail(path, lines=15):
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return "".join(f"  {line}\n" for line in text.splitlines()[-lines:])
