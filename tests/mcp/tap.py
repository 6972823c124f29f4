"""Records what an MCP server says, for clients that do not show all of it."""

import socket
import socketserver
import threading
from urllib.parse import urlsplit

from expected import PATIENCE

PIECE = 65536
# Seconds without a byte after which a connection is given up.
SILENCE = 120 * PATIENCE


def through_tee(record, command):
    """The command of a server on standard output, whose words are also written to the file `record`."""
    return ["sh", "-c", '"$@" | tee -a "$0"', str(record), *command]


class HttpTap:
    """Passes bytes on between clients and a server, and writes what the server says to the file `record`."""

    def __init__(self, record, url):
        parts = urlsplit(url)
        server = (parts.hostname, parts.port)
        lock = threading.Lock()

        def pass_on(source, target, keep):
            try:
                while piece := source.recv(PIECE):
                    if keep:
                        with lock, open(record, "ab") as file:
                            file.write(piece)
                    target.sendall(piece)
            except OSError:
                pass
            finally:
                # Closing one half would hide from the server that its client is gone.
                for end in (source, target):
                    try:
                        end.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass

        class Connection(socketserver.BaseRequestHandler):
            def handle(self):
                with socket.create_connection(server, timeout=SILENCE) as upstream:
                    self.request.settimeout(SILENCE)
                    answers = threading.Thread(target=pass_on, args=(upstream, self.request, True), daemon=True)
                    answers.start()
                    pass_on(self.request, upstream, False)
                    answers.join()

        class Listener(socketserver.ThreadingTCPServer):
            daemon_threads = True

            def handle_error(self, *_):
                """A connection that breaks is its client's to report."""

        self.listener = Listener(("127.0.0.1", 0), Connection)
        self.url = f"http://127.0.0.1:{self.listener.server_address[1]}{parts.path}"
        threading.Thread(target=self.listener.serve_forever, daemon=True).start()

    def close(self):
        """Takes no more connections; those that are open end with this program."""
        self.listener.shutdown()
