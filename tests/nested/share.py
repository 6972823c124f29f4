"""Serves folders of this machine to the outer Linux: a tree of bind mounts, handed to virtiofsd.

Runs in a mount namespace of its own (see machine.py), so everything that is mounted here ends with it. All of it is
read-only but `out`: what runs in the bed cannot change this machine, whatever it does to its own root.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY = 1
SYS_MOUNT_SETATTR = 442
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18
# QEMU's own, and the separate package that took its place in later releases.
DAEMONS = ["/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"]

libc = ctypes.CDLL(None, use_errno=True)


def checked(result, what):
    if result != 0:
        number = ctypes.get_errno()
        sys.exit(f"bed: cannot mount {what}: {os.strerror(number)}")


def mount(source, target, kind, flags, data=None):
    encoded = [part and str(part).encode() for part in (source, target, kind)]
    checked(libc.mount(*encoded, flags, data and data.encode()), target)


def bind(source, target, writable=False):
    target.mkdir(parents=True, exist_ok=True)
    mount(source, target, None, MS_BIND | MS_REC)
    if not writable:
        # struct mount_attr: set, clear, propagation, user namespace.
        attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
        size = ctypes.sizeof(attributes)
        path = str(target).encode()
        checked(libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, attributes, size), target)


def build_tree(tree, plan):
    """The tree, and in it the list of what ./init makes of it: path by path, parents first."""
    mount("none", tree, "tmpfs", 0, "mode=755")
    bind(plan["bed"], tree / "bed")
    bind(plan["out"], tree / "out", writable=True)
    (tree / "root").mkdir()
    lines = []
    for name in sorted({*plan["show"], *plan["layer"]}):
        folder, inside = Path(name), tree / "root" / name.lstrip("/")
        kind = "layer" if name in plan["layer"] else "show"
        if folder.is_symlink():
            lines.append(f"link\t{folder}\t{os.readlink(folder)}")
        elif folder.is_dir():
            # It may lie in a folder that is there already.
            new = not inside.exists()
            if new:
                bind(folder, inside)
            if new or kind == "layer":
                lines.append(f"{kind}\t{folder}")
    (tree / "folders").write_text("".join(f"{line}\n" for line in lines))


def daemon_command(tree, socket):
    for program in DAEMONS:
        if os.path.exists(program):
            if program == DAEMONS[0]:
                # Files that the host changes meanwhile are not the bed's business: everything may be cached.
                return [program, "-f", f"--socket-path={socket}", "-o", f"source={tree},cache=always,log_level=err"]
            return [program, f"--socket-path={socket}", f"--shared-dir={tree}", "--cache=always", "--log-level=error"]
    sys.exit("bed: virtiofsd is missing: apt-get install qemu-system-common (or virtiofsd)")


def main():
    tree, socket, plan = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    mount("none", "/", None, MS_PRIVATE | MS_REC)
    build_tree(tree, plan)
    # The daemon leaves a file there that names its process.
    mount("none", "/run", "tmpfs", 0, "mode=755")
    command = daemon_command(tree, socket)
    os.execv(command[0], command)


main()
