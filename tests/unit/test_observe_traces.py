"""Spans of requests, as an exporter gets them."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import requests
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from llorch_serve.errors import NonFiniteLogitsError, UsageError
from llorch_serve.observe import traces
from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.observe.traces import Tracer, otlp_provider
from llorch_serve.requests import ChatMessage, ChatPrompt, GenerationRequest, ScoreRequest, TextPrompt
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.terminal import serving_fronts
from llorch_serve.terminal.serving_fronts import open_fronts
from llorch_serve.worker.local import stream
from support.fakes.generator import INFO, FakeGenerator

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARY = "xylophone-canary"


@pytest.fixture
def traced():
    """A generator, what is inside it, and a function that returns the spans so far."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    inner = FakeGenerator()
    generator = ObservedGenerator(inner, [Tracer(provider, lambda: "fake-1M")])

    def spans():
        generator.settle()
        return exporter.get_finished_spans()

    yield generator, inner, spans
    generator.close()


def test_a_request_is_a_span_under_the_callers(traced):
    generator, _, spans = traced
    before = time.time_ns()
    sampling = SamplingParams(temperature=0.5, max_tokens=2, seed=3, stop=(CANARY,))
    prompt = ChatPrompt((ChatMessage("user", CANARY),))
    request = GenerationRequest("r1", prompt, sampling, correlation_id="c-1", traceparent=PARENT)
    list(stream(generator, request))
    (span,) = spans()
    assert span.name == "chat fake-1M"
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "llorch",
        "gen_ai.request.model": "fake-1M",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.seed": 3,
        "gen_ai.response.id": "r1",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(f"<user>{CANARY}"),
        "gen_ai.usage.output_tokens": 2,
        "llorch.correlation_id": "c-1",
    }
    assert {key: span.attributes[key] for key in expected} == expected
    assert "gen_ai.request.top_p" not in span.attributes
    (first,) = span.events
    assert before <= span.start_time <= first.timestamp <= span.end_time <= time.time_ns() + 10**7
    assert CANARY not in span.to_json()


def test_scores_are_a_span_too(traced):
    generator, _, spans = traced
    request = ScoreRequest(
        "s1", TextPrompt(CANARY), (TextPrompt(CANARY),), correlation_id="c-1", traceparent=PARENT
    )
    generator.submit_score(request, SimpleNamespace(deliver=lambda updates: None))
    (span,) = spans()
    assert span.name == "score fake-1M"
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    expected = {
        "gen_ai.operation.name": "score",
        "gen_ai.response.id": "s1",
        "gen_ai.response.finish_reasons": ("score",),
        "gen_ai.usage.input_tokens": 2 * len(CANARY),
        "gen_ai.usage.output_tokens": 0,
        "llorch.correlation_id": "c-1",
    }
    assert {key: span.attributes[key] for key in expected} == expected
    assert "gen_ai.request.temperature" not in span.attributes
    assert CANARY not in span.to_json()


def test_a_failure_is_told_by_its_class(traced):
    generator, inner, spans = traced
    inner.fail_step = NonFiniteLogitsError(CANARY)
    with pytest.raises(NonFiniteLogitsError):
        list(stream(generator, GenerationRequest("r1", TextPrompt("Hi"), traceparent="nonsense")))
    (span,) = spans()
    assert (span.name, span.parent) == ("text_completion fake-1M", None)
    assert span.attributes["error.type"] == "NonFiniteLogitsError"
    assert span.status.status_code is StatusCode.ERROR
    assert CANARY not in span.to_json()


def test_spans_go_to_the_endpoint_that_is_named():
    provider = otlp_provider("http://127.0.0.1:9/", "1.2")
    exporter = provider._active_span_processor._span_processors[0].span_exporter
    assert exporter._endpoint == "http://127.0.0.1:9/v1/traces"
    provider.shutdown()


@pytest.mark.parametrize(("host", "direct"), [("127.0.0.1", True), ("collector.example", False)])
def test_a_collector_on_this_machine_is_called_without_a_proxy(monkeypatch, host, direct):
    made = []

    class Kept(requests.Session):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(requests, "Session", Kept)
    otlp_provider(f"http://{host}:4318", "1.2").shutdown()
    (session,) = made
    assert session.trust_env is not direct


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4318", "collector", "grpc://a:4317", "http://", "http://a:x", "http://a?key=b"]
)
def test_an_endpoint_that_is_no_url_is_refused_at_start(endpoint):
    with pytest.raises(UsageError, match=r"--otlp-endpoint is .* expected a URL"):
        open_fronts(None, endpoint)


def test_a_request_whose_span_cannot_begin_is_answered_and_counted_all_the_same(traced, monkeypatch, caplog):
    _, inner, _ = traced
    provider, ended = TracerProvider(), []
    tracer = Tracer(provider, lambda: "fake-1M")
    monkeypatch.setattr(tracer._tracer, "start_span", lambda *_, **__: 1 / 0)
    after = SimpleNamespace(
        begun=lambda seen: None,
        produced=lambda *_: None,
        ended=lambda seen, ending: ended.append(ending),
        close=lambda: None,
    )
    generator = ObservedGenerator(inner, [tracer, after])
    list(stream(generator, GenerationRequest("r1", TextPrompt("Hi"), traceparent=PARENT)))
    generator.settle()
    assert [ending.error for ending in ended] == [None]
    assert inner.submitted[0].traceparent == PARENT
    assert caplog.text.count("an observer failed") == 1


def test_a_span_names_the_model_that_a_front_serves_by_then(monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "otlp_provider", lambda *_: provider)
    inner = FakeGenerator()
    generator = ObservedGenerator(inner, [serving_fronts._tracer("http://127.0.0.1:1")(inner)])
    list(stream(generator, GenerationRequest("r1", TextPrompt("Hi"))))
    monkeypatch.setattr(inner, "model_info", lambda: replace(INFO, model_id="another"))
    list(stream(generator, GenerationRequest("r2", TextPrompt("Hi"))))
    generator.settle()
    told = [(span.name, span.attributes["gen_ai.response.model"]) for span in exporter.get_finished_spans()]
    assert told == [("text_completion fake-1M", "fake-1M"), ("text_completion another", "another")]
    generator.close()
