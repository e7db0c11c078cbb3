"""A server of a folder, over HTTP and as S3 answers, that can be told to fail at chosen files."""

from __future__ import annotations

import contextlib
import gzip
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

NO_KEYS = (
    b'<?xml version="1.0"?><ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>'
)

SWOLLEN_BYTES = 64 << 20
"""What a file has that the server lies about."""


class SlideServer:
    """Serves ``folder``; ``faults`` is (how a path ends, what to do there, how many times)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: dict[str, tuple[str, int]] = {}
        self.ranges = True
        self.asked: Counter[str] = Counter()
        self.over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or each answer waits 40 ms for the acknowledgement of its header

            def do_HEAD(self) -> None:
                server.answer(self)

            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *arguments: object) -> None:
                """Nothing is printed."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = urlsplit(request.path)
        path = unquote(parts.path)
        self.asked[f"{request.command} {path}"] += 1
        fault = self._fault(path)
        if fault == "hang":
            self.over.wait(20)
        if fault in ("hang", "drop"):
            request.close_connection = True
            return
        file = self.folder / path.lstrip("/")
        if fault == "refuse" or not file.is_file():
            listing = "list-type=2" in parts.query
            status = 200 if listing else 403 if fault == "refuse" else 404
            self._send(request, status, NO_KEYS if listing else b"")
            return
        if fault and fault.startswith("to "):
            request.send_response(302)
            request.send_header("Location", fault[3:].format(port=self.http.server_address[1]) + path)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        data, status = file.read_bytes(), 200
        if fault == "swell" and request.command == "GET":
            data = bytes(SWOLLEN_BYTES)
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
        if wanted and self.ranges:
            first, last = wanted.groups()
            data = data[-int(last) :] if not first else data[int(first) : int(last) + 1 if last else None]
            status = 206
        packed = fault == "pack" and request.command == "GET"
        self._send(request, status, gzip.compress(data) if packed else data, cut=fault == "cut", packed=packed)

    def _fault(self, path: str) -> str | None:
        for ending, (fault, times) in self.faults.items():
            if path.endswith(ending) and times > 0:
                self.faults[ending] = (fault, times - 1)
                return fault
        return None

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler, status: int, data: bytes, *, cut: bool = False, packed: bool = False
    ) -> None:
        request.send_response(status)
        if packed:
            request.send_header("Content-Encoding", "gzip")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        if request.command == "GET":
            with contextlib.suppress(ConnectionError):  # who asked has had enough
                request.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            request.close_connection = True


@contextmanager
def serving(folder: Path) -> Iterator[SlideServer]:
    """A running server of ``folder``."""
    server = SlideServer(folder)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.http.shutdown()
        thread.join()
        server.http.server_close()
