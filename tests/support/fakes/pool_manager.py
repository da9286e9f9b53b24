"""A small HTTP manager for tests: keeps what it is told, and answers as a test wants, late or not at all."""

from __future__ import annotations

import json
import queue
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE_S = 20.0
Message = dict[str, Any]


class Manager:
    """Listens until :meth:`die`; ``port`` 0 takes any free one, another one that of a manager that has died.

    answer: called with each message; returns the HTTP status to answer with. It may block.
    """

    def __init__(
        self,
        answer: Callable[[Message], int] = lambda _message: 200,
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.told: queue.SimpleQueue[Message] = queue.SimpleQueue()
        manager = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                message = json.loads(body)
                manager.told.put(message)
                status = answer(message)
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                except OSError:  # the worker did not wait
                    pass

            def log_message(self, *_arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}/workers"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def next(self, kind: str = "") -> Message:
        """Return the next message; kind: the next "ready", or the next heartbeat with that status."""
        while True:
            message = self.told.get(timeout=PATIENCE_S)
            if kind in ("", "ready" if "uri" in message else message["status"]):
                return message

    def die(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE_S)

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *_error: object) -> None:
        self.die()
