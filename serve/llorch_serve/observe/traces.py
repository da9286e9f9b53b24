"""One OpenTelemetry span for each request, after the conventions for generative AI.

Input: requests as ``tap.py`` sees them, with the caller's W3C traceparent. Output: spans to a provider, by
default one that sends them over OTLP. A span begins as its request is submitted, so that a replica's can be
under its front's, and gets its figures when the request has ended, on the observing thread. Spans carry
figures and ids; no text, neither prompts nor stop strings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from llorch_serve.client.proxy import is_loopback
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.observe.observer import SCORE, Ending, Observed, RequestFacts

_NS: Final = 1_000_000_000


def otlp_provider(endpoint: str, version: str, *, instance: str | None = None) -> TracerProvider:
    """Return a provider that sends spans over OTLP/HTTP to ``endpoint``/v1/traces. instance: which of several
    of this service they are of.
    """
    facts = {"service.name": "llorch", "service.version": version}
    if instance is not None:
        facts["service.instance.id"] = instance
    provider = TracerProvider(resource=Resource(facts))
    session = requests.Session()
    # A collector on this machine is called directly, whatever proxy the environment names.
    session.trust_env = not is_loopback(f"{urlsplit(endpoint).hostname}:0")
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", session=session)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Tracer:
    """Makes spans of requests. model_id: names what is served now, as a front's model may be replaced.
    Implements :class:`llorch_serve.observe.observer.Observer` and
    :class:`llorch_serve.observe.observer.Tracing`.
    """

    def __init__(self, provider: TracerProvider, model_id: Callable[[], str]) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("llorch")
        self._model_id = model_id

    def open(self, seen: Observed) -> str:
        """Begin the request's span under its caller's; return its traceparent."""
        request = seen.request
        model_id = self._model_id()
        carrier = {"traceparent": request.traceparent} if request.traceparent else {}
        seen.span = self._tracer.start_span(
            f"{request.operation} {model_id}",
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=seen.submitted_ns,
            attributes=_asked(request, model_id),
        )
        told: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(told, set_span_in_context(seen.span))
        return told.get("traceparent", "")

    def begun(self, seen: Observed) -> None:
        """See the protocol: the span has begun already."""

    def produced(self, seen: Observed, tokens: int, gap_s: float | None) -> None:
        """See the protocol: the span gets its figures at the end."""

    def ended(self, seen: Observed, ending: Ending) -> None:
        """End the request's span, with what was found."""
        span: Span | None = seen.span
        if span is None:  # it could not be begun, which has been logged
            return
        span.set_attributes(_found(seen, ending))
        if seen.first_s is not None:
            span.add_event("llorch.first_token", timestamp=_moment(seen, seen.first_s))
        if ending.error is not None:
            kind = type(ending.error).__name__
            span.set_attribute("error.type", kind)
            span.set_status(Status(StatusCode.ERROR, kind))
        span.end(end_time=_moment(seen, ending.at_s))

    def close(self) -> None:
        """Send what is still held."""
        self._provider.shutdown()


def _moment(seen: Observed, at_s: float) -> int:
    return seen.submitted_ns + int((at_s - seen.submitted_s) * _NS)


def _asked(request: RequestFacts, model_id: str) -> dict[str, AttributeValue]:
    given: dict[str, AttributeValue | None] = {
        "llorch.correlation_id": request.correlation_id or None,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.top_k": request.top_k,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.seed": request.seed,
    }
    named: dict[str, AttributeValue] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "llorch",
        "gen_ai.request.model": model_id,
        "gen_ai.response.model": model_id,
        "gen_ai.response.id": request.request_id,
    }
    return named | {name: value for name, value in given.items() if value is not None}


def _found(seen: Observed, ending: Ending) -> dict[str, AttributeValue]:
    completion = ending.completion
    found: dict[str, AttributeValue] = {}
    if seen.first_s is not None:
        found["gen_ai.server.time_to_first_token"] = seen.first_s - seen.submitted_s
    if ending.replicas:
        found["llorch.replica"] = ending.replicas[-1]
    if failed := ending.replicas[:-1]:
        found["llorch.replicas_failed"] = failed
    if completion is None:
        return found
    reason = SCORE if ending.scored else completion.reason.value
    if completion.reason is FinishReason.CANCELLED:
        reason = "abort"
    return found | {
        "gen_ai.response.finish_reasons": [reason],
        "gen_ai.usage.input_tokens": completion.prompt_tokens,
        "gen_ai.usage.output_tokens": completion.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": completion.cached_tokens,
        "llorch.queue_s": completion.timings.queue_s,
    }
