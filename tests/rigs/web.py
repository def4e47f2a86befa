"""A web server with a folder's files: ranges, tags, and answers that go wrong when they are asked to."""
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class Server(ThreadingHTTPServer):
    """asked: (path, bytes answered) of each GET. failing: called with the handler and the path; answers itself if true.
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.asked, self.failing = Path(folder), [], lambda handler, path: False
        self.url = f"http://127.0.0.1:{self.server_port}"


def tag(path: Path) -> str:
    stat = path.stat()
    return f'"{stat.st_mtime_ns}-{stat.st_size}"'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET(with_body=False)

    def do_GET(self, with_body=True):
        path = self.server.folder / unquote(self.path).lstrip("/")
        if with_body and self.server.failing(self, path.name):
            return
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content, stat = path.read_bytes(), path.stat()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, end = (int(wanted[1]), min(int(wanted[2]) + 1, len(content))) if wanted else (0, len(content))
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", tag(path))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Last-Modified", self.date_time_string(stat.st_mtime))
        self.end_headers()
        if with_body:
            self.server.asked.append((path.name, end - start))
            self.wfile.write(content[start:end])

    def log_message(self, *_):
        pass


@contextmanager
def serving(folder):
    with Server(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
