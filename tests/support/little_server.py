"""A small HTTP server in this process, which answers as a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

Answer = Callable[[str, Any], tuple[int, Any]]


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Yield the address of a server that closes the connection at a POST.

    Args:
        answer: maps a GET's path and headers to a status and what is sent as JSON, or to another
            server's answer, which is sent on as it is.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, told = answer(self.path, self.headers)
            self.send_response(status)
            if isinstance(told, httpx.Response):
                self.send_header("Content-Type", told.headers["Content-Type"])
            self.end_headers()
            is_sent_on = isinstance(told, httpx.Response)
            self.wfile.write(told.content if is_sent_on else json.dumps(told).encode())

        def do_POST(self) -> None:
            self.connection.close()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
