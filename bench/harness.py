"""What every benchmark here needs: the program, the root files, the peers, timed runs, an honest end."""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import peers
from peers import BenchError

HERE = Path(__file__).resolve().parent
# A benchmark itself keeps the load between 1 and 1.5; beyond this others work too.
BUSY_LOAD = 2.0


def log(text):
    print(f"==> {text}", file=sys.stderr, flush=True)


def bathy_program():
    """The release binary, built by the wrapper if it is missing."""
    if named := os.environ.get("BATHY"):
        program = shutil.which(named)
        if program is None:
            raise BenchError(f"BATHY={named} is no program")
        return Path(program).resolve()
    repository = HERE.parent
    target = Path(os.environ.get("CARGO_TARGET_DIR") or repository / "target")
    program = target / "x86_64-unknown-linux-gnu/release/bathy"
    if not program.exists():
        log("building bathy")
        subprocess.run([repository / "bathy", "--version"], stdout=sys.stderr, check=True)
    return program


def default_image(program, cache):
    """The file and digest of the root image that bathy itself uses, built if it is missing."""
    done = subprocess.run([program, "setup", "--json"], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, check=True)
    digest = json.loads(done.stdout)["image"]["files"]["root.erofs"]
    for manifest in sorted(cache.glob("image-default/*/manifest.json")):
        if json.loads(manifest.read_text())["files"].get("root.erofs") == digest:
            return manifest.with_name("root.erofs"), digest
    raise BenchError(f"the image {digest} is not below {cache}")


def peer_files(cache):
    """The folder of setup.sh's results, one for each version of its recipe."""
    recipe = b"".join((HERE / name).read_bytes() for name in ("setup.sh", "microvm-init"))
    folder = cache / f"peers-{hashlib.sha256(recipe).hexdigest()[:16]}"
    programs = ("bwrap", "qemu-system-x86_64", "fsck.erofs")
    if not (folder / "versions").exists() or not all(map(shutil.which, programs)):
        log("fetching the contenders")
        subprocess.run(["nice", HERE / "setup.sh", folder], stdin=subprocess.DEVNULL,
                       stdout=sys.stderr, check=True)
    return folder


@dataclass(frozen=True)
class Bench:
    """What a benchmark works with; all of it is gone when the benchmark ends, however it ends."""

    program: Path
    # The root image, the same files as a folder, and where the peers' programs are.
    image: Path
    root: Path
    peers: Path
    # A folder for this run alone, on the disk that the cache is on.
    scratch: Path
    cleanup: contextlib.ExitStack

    @property
    def state(self):
        """The folder for bathy's state."""
        return self.scratch / "state"

    def bathy(self, *arguments, deadline=peers.DEADLINE_SECONDS):
        """Runs it for something that has to succeed: milliseconds and standard output."""
        return must([self.program, *arguments], peers.with_state(self.state), deadline)

    def sandboxes(self):
        """Everything that bathy knows about the sandboxes of this run."""
        return json.loads(self.bathy("ls", "--json")[1])

    def remove_all(self):
        """Ends and removes the sandboxes of this run."""
        if ids := [sandbox["id"] for sandbox in self.sandboxes()]:
            self.bathy("rm", "--force", *ids)

    def runsc(self, name, writable):
        """gVisor over the root files."""
        return peers.runsc(name, self.peers / "runsc", self.version("runsc"), self.root, self.scratch, writable)

    def runc(self):
        """The usual runtime of containers, over the root files."""
        return peers.runc(self.peers / "runc", self.version("runc"), self.root, self.scratch)

    def version(self, package):
        """Of what setup.sh fetched."""
        lines = (self.peers / "versions").read_text().splitlines()
        return dict(line.split(" ", 1) for line in lines)[package]


@contextlib.contextmanager
def bench():
    """Fetches and builds what is missing and makes the folders of one run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bathysphere"
    with contextlib.ExitStack() as cleanup:
        (cache / "bench").mkdir(parents=True, exist_ok=True)
        # In the cache, so that an unpacked image is moved and not copied.
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="run-", dir=cache / "bench")))
        program = bathy_program()
        image, digest = default_image(program, cache)
        folder = peer_files(cache / "bench")
        root = peers.share_root(image, digest, cache / "bench", scratch, cleanup)
        made = Bench(program, image, root, folder, scratch, cleanup)
        cleanup.callback(made.remove_all)
        yield made


def run_once(argv, environment=None, deadline=peers.DEADLINE_SECONDS):
    """Milliseconds from start to exit, status, standard output and error."""
    started = time.perf_counter()
    with subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True) as child:
        try:
            output, errors = child.communicate(timeout=deadline)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            output, errors = child.communicate()
            errors += f"\nended after {deadline} s without an exit"
        return (time.perf_counter() - started) * 1000, child.returncode, output, errors


def must(argv, environment=None, deadline=peers.DEADLINE_SECONDS):
    """The same for what has to succeed: milliseconds and standard output."""
    elapsed, status, output, errors = run_once([str(word) for word in argv], environment, deadline)
    if status != 0:
        raise BenchError(f"`{' '.join(map(str, argv))}` failed with status {status}; it printed:\n{(output + errors)[-2000:]}")
    return elapsed, output


def timed_run(peer, command):
    """One sample; a run that did not do its work is an error, not a sample."""
    elapsed, status, output, errors = run_once(peer.prepare(command), peer.environment)
    if not peer.accepts(command, status, output):
        raise BenchError(f"{peer.name} failed at `{command.name}` with status {status}; it printed:\n{(output + errors)[-2000:]}")
    return elapsed


def load():
    return round(os.getloadavg()[0], 2)


def machine(load_before):
    """Where and under what load the figures were taken."""
    return {"kernel": platform.release(), "processors": os.cpu_count(), "root": os.geteuid() == 0,
            "load_before": load_before, "load_after": load()}


def add_old_option(parser):
    parser.add_argument("--old", metavar="PROGRAM", type=Path,
                        help="another build's bathy, as one more contender, to see what a change has done")


def add_json_option(parser):
    parser.add_argument("--json", nargs="?", const="-", metavar="FILE",
                        help="write JSON to FILE; without FILE, to the standard output instead of the table")


def main(options, measure, lines, busy_after=True):
    """Measures, and shows the result the way that was asked for.

    `busy_after`: whether a high load at the end means that others worked too, and not only the benchmark.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        result = measure(options)
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if options.json == "-":
        print(json.dumps(result, indent=2))
        return
    for version in [json.dumps(result["machine"]), *dict.fromkeys(result["versions"].values())]:
        print(version)
    loads = [result["machine"]["load_before"], result["machine"]["load_after"] if busy_after else 0]
    if max(loads) > BUSY_LOAD:
        print("The machine was busy with something else: trust neither times nor ratios.")
    print("\n".join(lines(result)))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
