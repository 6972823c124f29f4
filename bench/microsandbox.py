"""microsandbox as it is published: `msb` and its own guest kernel, over the same root files."""

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from harness import HERE, run_once
from peers import BenchError, first_line

VERSION = "0.7.11"
SETUP = HERE / "microsandbox-setup.sh"
SYS_FINIT_MODULE = 313
# A first start also makes its database.
DEADLINE_SECONDS = 180


def folder(cache, image_digest):
    """Where what it runs on is, for each version of it and of the image."""
    recipe = hashlib.sha256(SETUP.read_bytes() + VERSION.encode() + image_digest.encode()).hexdigest()
    return cache / "bench" / f"microsandbox-{recipe[:16]}"


def fetch(cache, image, image_digest, bed):
    """On a machine with a network. Returns why there will be no microsandbox, if so."""
    target = folder(cache, image_digest)
    if target.exists():
        return None
    done = subprocess.run(["nice", SETUP, target, VERSION, image, bed], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False)
    sys.stderr.write(done.stdout)
    return None if done.returncode == 0 else f"its set-up failed: {done.stdout.strip()[-500:]}"


class Microsandbox:
    """Ready to run commands."""

    def __init__(self, cache, image_digest, guest, scratch, cleanup):
        source = folder(cache, image_digest)
        if not source.exists():
            raise BenchError(f"{source} is missing: run bench/kvm where there is a network first")
        if os.geteuid() != 0:
            raise BenchError("only root can mount its root files")
        if not Path("/dev/loop-control").exists():
            self.load(source / "loop.ko")
        files, place = scratch / "microsandbox.ext4", scratch / "microsandbox"
        subprocess.run(["cp", "--sparse=always", source / "files.ext4", files], check=True)
        place.mkdir()
        mounted = subprocess.run(["mount", "-o", "loop", files, place], capture_output=True, text=True, check=False)
        if mounted.returncode != 0:
            raise BenchError(f"its root files cannot be mounted: {mounted.stderr.strip()}")
        cleanup.callback(subprocess.run, ["umount", "--lazy", place], check=True)
        self.environment = {**os.environ, "MSB_HOME": str(place / "home")}
        self.program = str(source / "bin/msb")
        self.options = ["--no-tty", "--no-stdin", "--no-net", "--cpus", str(guest.cpus), "--memory", f"{guest.memory_mib}M"]
        self.root = str(place / "root")
        self.starts = 0
        self.version = first_line([self.program, "--version"])

    @staticmethod
    def load(module):
        """The bed's kernel comes without it, and the bed has no program that loads modules."""
        libc = ctypes.CDLL(None, use_errno=True)
        with module.open("rb") as file:
            if libc.syscall(SYS_FINIT_MODULE, file.fileno(), b"", 0) != 0:
                raise BenchError(f"{module} does not load: {os.strerror(ctypes.get_errno())}")

    def run(self, argv):
        """Milliseconds of a whole command in a new sandbox."""
        self.starts += 1
        command = [self.program, "run", *self.options, self.root, "--", *argv]
        elapsed, status, output, errors = run_once(command, self.environment, DEADLINE_SECONDS)
        if status != 0:
            raise BenchError(f"`msb run` failed with status {status}; it printed:\n{(output + errors)[-2000:]}")
        return elapsed
