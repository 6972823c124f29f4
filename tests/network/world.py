"""Two network namespaces, a cable between them, and the servers of both. Started in a network namespace of its own,
which becomes the side where the product runs: world.py FOLDER, with zone.json and a folder `files` in it.

Prints the number of the other side's process, then "ready". Ends when its standard input does, and takes the other
side and the folder along.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import cable
import serve

HERE = Path(__file__).resolve().parent
PYTHON = [sys.executable, "-B", "-E", "-s"]
# These speak TLS under their addresses, too.
CERTIFIED_ADDRESSES = ["1.1.1.1", "8.8.8.8", "93.184.215.14"]


class Outside:
    """The process of the other side."""

    def __init__(self, folder):
        command = ["unshare", "--net", "--", *PYTHON, str(HERE / "outside.py"), str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def expect(self, word):
        line = self._process.stdout.readline()
        if line != word + "\n":
            raise SystemExit(f"the other side said {line!r} instead of {word!r}")

    def ask(self, word):
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.expect(word)

    def end(self):
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def make_certificate(folder):
    """For every name of the zone that has an address. It signs itself, so that a client can be told to trust it."""
    zone = json.loads((folder / "zone.json").read_text())
    names = [f"DNS:{name}" for name, said in zone.items() if {"A", "AAAA", "CNAME", "turns"} & said.keys()]
    names += [f"IP:{address}" for address in CERTIFIED_ADDRESSES]
    key, authority = folder / "key.pem", folder / "authority.pem"
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    request += ["-days", "2", "-subj", "/CN=site.example", "-addext", "subjectAltName=" + ",".join(names)]
    made = subprocess.run([*request, "-keyout", key, "-out", authority], capture_output=True, text=True)
    if made.returncode:
        raise SystemExit(f"openssl made no certificate: {made.stderr}")
    (folder / "certificate.pem").write_text(key.read_text() + authority.read_text())


def main():
    folder = Path(sys.argv[1])
    outside = Outside(folder)
    try:
        print(outside.pid, flush=True)
        make_certificate(folder)
        outside.expect("here")
        cable.lay(outside.pid)
        cable.ip(cable.INSIDE)
        outside.ask("ready")
        serve.run("inside", folder, before_mark=lambda: outside.ask("marked"))
        # A test that was killed cannot do it.
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        outside.end()


if __name__ == "__main__":
    main()
