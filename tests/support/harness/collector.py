"""A collector of spans over OTLP/HTTP, on the loopback."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import threading
from collections.abc import Iterator

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from support.fakes.generator import PATIENCE_S


class SpanCollector:
    """What has come. url: where spans are sent to."""

    def __init__(self) -> None:
        self.url = ""
        self._spans: list[Span] = []
        self._came = threading.Condition()

    def take(self, raw: bytes) -> None:
        """Take what one call has brought."""
        found = ExportTraceServiceRequest.FromString(raw).resource_spans
        with self._came:
            self._spans += [span for one in found for scope in one.scope_spans for span in scope.spans]
            self._came.notify_all()

    def of_trace(self, trace_id: str) -> list[Span]:
        """Wait for spans of a trace; return those that have come."""

        def found() -> list[Span]:
            return [span for span in self._spans if span.trace_id.hex() == trace_id]

        with self._came:
            assert self._came.wait_for(found, PATIENCE_S), "no span of this trace has come"
            return found()


@contextlib.contextmanager
def span_collector() -> Iterator[SpanCollector]:
    """Collect spans until left."""
    made = SpanCollector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            made.take(gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        yield made
        server.shutdown()
