"""Whose memory is whose, by what the host's kernel says of each process.

The guest's RAM is one memfd that several processes of a sandbox map at once: the guest kernel, its processes' stubs and
the keeper, which serves devices in it. It is counted once, by the size of the file in memory, mapped or not. Everything
else is counted by proportional set size (PSS): a page that n processes map is 1/n of a page for each of them, so a sum
over processes counts every page once, and pages of programs that many sandboxes share are shared out among them.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

KIB = 1024
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """One that was there when it was looked for; the start time tells it from a later one with its number."""

    pid: int
    parent: int
    started: int
    ticks: int
    name: str
    command: str


def processes():
    """All that run, by number. Zombies are not among them: they have nothing but a number left."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name is in parentheses and may hold anything.
            name, rest = (entry / "stat").read_text(errors="replace").split("(", 1)[1].rsplit(")", 1)
            fields = rest.split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, IndexError):
            continue
        if fields[0] not in "ZX":
            pid = int(entry.name)
            found[pid] = Process(pid, int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12]), name, command)
    return found


def with_descendants(roots, everybody):
    """Some processes and all that descend from them."""
    children = {}
    for process in everybody.values():
        children.setdefault(process.parent, []).append(process.pid)

    members, waiting = {}, list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in everybody and pid not in members:
            members[pid] = everybody[pid]
            waiting += children.get(pid, [])
    return list(members.values())


@dataclass
class Memory:
    """Bytes of one or more processes."""

    # PSS of everything but the guest's RAM, in all and by process name.
    rest: int = 0
    by_name: dict = field(default_factory=dict)
    # What the host's kernel needs to map it all; not part of PSS.
    page_tables: int = 0
    # Guest RAM files that are in memory: size by identity.
    ram: dict = field(default_factory=dict)

    def add(self, process, ram_name):
        """Counts one process in. `ram_name` begins the name of the guest RAM's file."""
        folder = Path(f"/proc/{process.pid}")
        try:
            rest = pss_without(folder, ram_name)
            self.page_tables += page_tables(folder)
            for link in (folder / "fd").iterdir():
                if os.readlink(link).startswith(ram_name):
                    data = os.stat(link)
                    self.ram[data.st_dev, data.st_ino] = data.st_blocks * 512
        except (FileNotFoundError, ProcessLookupError):
            # It ended just now.
            return
        self.rest += rest
        # Forks that run no program of their own have no command line.
        name = os.path.basename(process.command.split(" ", 1)[0]) or process.name
        self.by_name[name] = self.by_name.get(name, 0) + rest


def pss_without(folder, ram_name):
    """Proportional set size without mappings of files whose name begins so."""
    total, counts = 0, True
    for line in (folder / "smaps").read_text().splitlines():
        key = line.split(None, 1)[0]
        if not key.endswith(":"):
            # address permissions offset device inode name
            name = (line.split(None, 5) + [""])[5]
            counts = not name.startswith(ram_name)
        elif key == "Pss:" and counts:
            total += int(line.split()[1]) * KIB
    return total


def page_tables(folder):
    for line in (folder / "status").read_text().splitlines():
        if line.startswith("VmPTE:"):
            return int(line.split()[1]) * KIB
    return 0


def available():
    """What the host could still give out, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    raise OSError("/proc/meminfo does not tell what is available")
