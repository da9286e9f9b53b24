"""A request of a front and its replica's work are one trace, which tells who answered."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from llorch_serve.calls.interfaces import ClosableGenerator
from llorch_serve.errors import UnavailableError, UsageError
from llorch_serve.observe.logs import FIELDS
from llorch_serve.observe.narration import Narrator
from llorch_serve.observe.replica import find_observation
from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.observe.traces import Tracer, otlp_provider
from llorch_serve.requests import GenerationRequest, ScoreRequest, TextPrompt
from support.fakes.generator import FakeGenerator
from support.fakes.replicas import FakeReplicas, replicas_of, routed
from support.harness.worker import Sink

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """A front over two replicas, each of which makes spans of its own; replicas die before their first
    part.
    """

    def __init__(self, dead: int = 0, provider: TracerProvider | None = None) -> None:
        self.exporter = InMemorySpanExporter()
        self.inner = [FakeGenerator(), FakeGenerator()]
        self.workers = [self._observed(each, TracerProvider()) for each in self.inner]
        self.replicas: FakeReplicas = replicas_of(*self.workers)
        self.replicas.parts_left = {f"r{place}": 0 for place in range(dead)}
        behind = routed(*self.workers, replicas=self.replicas)
        self.front = self._observed(behind, provider or TracerProvider())

    def _observed(self, generator: ClosableGenerator, provider: TracerProvider) -> ObservedGenerator:
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        return ObservedGenerator(generator, [Tracer(provider, lambda: "fake-1M"), Narrator("w")])

    def answer(self, traceparent: str = PARENT) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """Have a request answered; return the front's span and those of replicas."""
        sink = Sink()
        asked = GenerationRequest(
            "r", TextPrompt("Hi"), correlation_id="c-1", traceparent=traceparent, owner="o"
        )
        self.front.submit(asked, sink)
        sink.answers("r")
        return self.spans()

    def spans(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        for each in (*self.workers, self.front):
            each.settle()
        found = self.exporter.get_finished_spans()
        (front,) = (span for span in found if "llorch.replica" in (span.attributes or {}))
        return front, [span for span in found if span is not front]

    def close(self) -> None:
        self.front.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.close()


def id_of(span: ReadableSpan) -> tuple[str, str]:
    context = span.context
    assert context is not None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


@pytest.mark.parametrize("traceparent", [PARENT, ""])
def test_a_replicas_span_is_under_the_fronts(traced: Traced, traceparent: str) -> None:
    front, (replica,) = traced.answer(traceparent)
    trace, span = id_of(front)
    if traceparent:
        assert front.parent is not None
        assert (trace, f"{front.parent.span_id:016x}") == tuple(PARENT.split("-")[1:3])
    assert replica.parent is not None
    assert (id_of(replica)[0], f"{replica.parent.span_id:016x}") == (trace, span)
    assert replica.attributes is not None
    assert front.attributes is not None
    assert replica.attributes["llorch.correlation_id"] == front.attributes["llorch.correlation_id"] == "c-1"
    assert replica.start_time is not None
    assert front.start_time is not None
    assert front.start_time <= replica.start_time


def test_scores_are_traced_through_too(traced: Traced) -> None:
    text, sink = TextPrompt("Hi"), Sink()
    traced.front.submit_score(ScoreRequest("s", text, (text,), traceparent=PARENT), sink)
    sink.answers("s")
    front, (replica,) = traced.spans()
    assert replica.parent is not None
    assert (id_of(replica)[0], f"{replica.parent.span_id:016x}") == id_of(front)
    assert id_of(front)[0] == PARENT.split("-")[1]


def test_the_fronts_span_says_who_answered(traced: Traced) -> None:
    front, _ = traced.answer()
    assert front.attributes is not None
    assert front.attributes["llorch.replica"] == "r0"
    assert "llorch.replicas_failed" not in front.attributes


def test_the_fronts_span_and_its_log_say_that_it_was_tried_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    traced = Traced(dead=1)
    try:
        with caplog.at_level(logging.INFO, "llorch.narration"):
            front, _ = traced.answer()
        assert front.attributes is not None
        assert front.attributes["llorch.replica"] == "r1"
        assert front.attributes["llorch.replicas_failed"] == ("r0",)
        told = [getattr(record, FIELDS, {}) for record in caplog.records]
        (of_front,) = (fields for fields in told if "replica" in fields)
        assert (of_front["replica"], of_front["replicas_failed"]) == ("r1", ["r0"])
    finally:
        traced.close()


def test_the_fronts_span_names_the_replicas_of_a_request_that_failed() -> None:
    traced = Traced(dead=2)
    try:
        front, _ = traced.answer()
        assert front.attributes is not None
        assert front.attributes["error.type"] == UnavailableError.__name__
        assert front.attributes["llorch.replica"] == "r1"
        assert front.attributes["llorch.replicas_failed"] == ("r0",)
    finally:
        traced.close()


def test_what_a_front_does_not_sample_no_replica_does() -> None:
    traced = Traced(provider=TracerProvider(sampler=ParentBased(ALWAYS_OFF)))
    try:
        sink = Sink()
        traced.front.submit(GenerationRequest("r", TextPrompt("Hi")), sink)
        sink.answers("r")
        traced.workers[0].settle()
        assert traced.exporter.get_finished_spans() == ()
    finally:
        traced.close()


def test_a_replica_sends_spans_where_its_settings_say() -> None:
    assert find_observation(None, "1.2", "smollm2#abc") is None
    observe = find_observation("http://127.0.0.1:9", "1.2", "smollm2#abc")
    assert observe is not None
    inner = FakeGenerator()
    observed = observe(inner)
    assert isinstance(observed, ObservedGenerator)
    assert observed.inner is inner
    observed.close()
    provider = otlp_provider("http://127.0.0.1:9", "1.2", instance="smollm2#abc")
    assert provider.resource.attributes["service.instance.id"] == "smollm2#abc"
    provider.shutdown()


def test_a_node_without_the_library_of_traces_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "llorch_serve.observe.traces", None)
    with pytest.raises(UsageError, match=r"otlp_endpoint .* pip install .*otel"):
        find_observation("http://127.0.0.1:9", "1.2", "a")
