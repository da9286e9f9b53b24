"""A scrape as Prometheus reads it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llorch_serve.cluster.interfaces import ReplicaLoad
from llorch_serve.cluster.totals import Tally
from llorch_serve.errors import InvalidRequestError
from llorch_serve.observe.meters import Meters
from llorch_serve.observe.observer import Observed, RequestFacts
from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.requests import GenerationRequest, ScoreRequest, TextPrompt
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.local import stream
from support.fakes.generator import INFO, LOAD, FakeGenerator


def scrape(meters):
    """Return every sample by its name and labels; fails if a family is there twice."""
    text, kind = meters.expose()
    assert kind.startswith("text/plain; version=")
    families = list(text_string_to_metric_families(text.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture
def scraped():
    """The samples after three requests: one of 3 tokens, one that a stop string ended, one refused."""
    meters, inner = Meters(), FakeGenerator()
    generator = ObservedGenerator(inner, [meters])
    meters.watch(generator)
    for name, sampling in (("a", SamplingParams(max_tokens=3)), ("b", SamplingParams(stop=("w2",)))):
        list(stream(generator, GenerationRequest(name, TextPrompt("Hello"), sampling)))
    with pytest.raises(InvalidRequestError):
        list(stream(generator, GenerationRequest("c", TextPrompt("Hi"), SamplingParams(top_p=2))))
    generator.settle()
    meters.count_http("/health", 200)
    yield scrape(meters)
    generator.close()


def test_the_generators_figures(scraped):
    assert scraped["llorch:num_requests_running",] == LOAD.running
    assert scraped["llorch:num_requests_waiting",] == LOAD.waiting
    assert scraped["llorch:kv_cache_usage_perc",] == LOAD.kv_tokens_running / LOAD.kv_tokens_total
    assert scraped["llorch:prompt_tokens_total",] == LOAD.prompt_tokens
    assert scraped["llorch:generation_tokens_total",] == LOAD.generated_tokens
    assert scraped["llorch:prefix_cache_queries_total",] == LOAD.prompt_tokens
    assert scraped["llorch:prefix_cache_hits_total",] == LOAD.cached_tokens
    assert scraped["llorch:spec_decode_num_accepted_tokens_total",] == LOAD.accepted_tokens
    assert any(key[0] == "llorch:model_info" and INFO.model_id in key for key in scraped)


def test_what_requests_took(scraped):
    counts = {
        "time_to_first_token_seconds": 2,
        "inter_token_latency_seconds": 3,  # two after the first of three tokens, one after the first of two
        "e2e_request_latency_seconds": 2,
        "request_queue_time_seconds": 2,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 2,
    }
    assert {name: scraped[f"llorch:{name}_count",] for name in counts} == counts
    assert scraped["llorch:request_queue_time_seconds_sum",] == 2 * 0.25  # as the fake generator says
    assert scraped["llorch:request_decode_time_seconds_sum",] == 2 * 1.75
    assert scraped["llorch:request_prompt_tokens_sum",] == 2 * len("Hello")
    assert scraped["llorch:request_generation_tokens_sum",] == 3 + 2
    assert scraped["llorch:request_queue_time_seconds_bucket", "0.25"] == 2
    assert scraped["llorch:request_queue_time_seconds_bucket", "0.1"] == 0


def test_how_requests_ended(scraped):
    ended = {key[1]: value for key, value in scraped.items() if key[0] == "llorch:request_success_total"}
    assert ended == {"stop": 1, "length": 1, "tool_calls": 0, "abort": 0, "score": 0}
    assert scraped["llorch:request_failure_total", "InvalidRequestError"] == 1
    assert scraped["llorch:http_requests_total", "/health", "200"] == 1


def test_scores_count_as_requests_that_generate_nothing():
    meters = Meters()
    generator = ObservedGenerator(FakeGenerator(), [meters])
    request = ScoreRequest("s", TextPrompt("Hello"), (TextPrompt("abc"), TextPrompt("d")))
    generator.submit_score(request, SimpleNamespace(deliver=lambda updates: None))
    generator.close()
    samples = scrape(meters)
    assert samples["llorch:request_success_total", "score"] == 1
    assert samples["llorch:request_success_total", "length"] == 0
    assert samples["llorch:e2e_request_latency_seconds_count",] == 1
    assert samples["llorch:request_queue_time_seconds_sum",] == 0.25  # as the fake generator says
    assert samples["llorch:request_prompt_tokens_sum",] == len("Hello") + 3 + 1
    assert samples["llorch:request_generation_tokens_count",] == 0
    assert samples["llorch:time_to_first_token_seconds_count",] == 0


def test_guessed_tokens_share_the_time_that_they_took():
    meters = Meters()
    facts = RequestFacts("a", "text_completion")
    seen = Observed(facts, submitted_s=0, submitted_ns=0, first_s=1, last_s=2)
    meters.produced(seen, 4, 0.4)
    samples = scrape(meters)
    assert samples["llorch:inter_token_latency_seconds_count",] == 4
    assert samples["llorch:inter_token_latency_seconds_sum",] == pytest.approx(0.4)
    assert samples["llorch:inter_token_latency_seconds_bucket", "0.1"] == 4
    assert samples["llorch:inter_token_latency_seconds_bucket", "0.075"] == 0


def test_the_process(scraped):
    assert scraped["process_resident_memory_bytes",] > 1e6


def test_two_workers_in_a_process_count_apart(scraped):
    fresh = scrape(Meters())
    assert fresh["llorch:time_to_first_token_seconds_count",] == 0
    assert ("llorch:num_requests_running",) not in fresh


class Replicas(FakeGenerator):
    """A generator whose model runs on replicas."""

    def __init__(self, *names):
        super().__init__()
        loads = (replace(LOAD, running=place) for place, _ in enumerate(names))
        self._loads = [ReplicaLoad(name, "f", load, 100) for name, load in zip(names, loads, strict=True)]

    def totals(self):
        return Tally("f").look(self._loads)


def scraped_of(*names):
    meters, generator = Meters(), Replicas(*names)
    meters.watch(generator)
    try:
        return scrape(meters)
    finally:
        generator.close()


def test_each_replica_has_figures_of_its_own():
    found = scraped_of("x", "y")
    assert found["llorch:replicas",] == 2
    assert found["llorch:replica_num_requests_running", "x"] == 0
    assert found["llorch:replica_num_requests_running", "y"] == 1
    assert found["llorch:replica_prefix_cache_hits_total", "y"] == LOAD.cached_tokens
    assert found["llorch:replica_memory_bytes", "x"] == 100
    assert found["llorch:num_slots",] == LOAD.slots  # of the generator itself, which adds them up


def test_no_replica_is_no_error_and_a_worker_has_none():
    assert scraped_of()["llorch:replicas",] == 0
    meters, generator = Meters(), FakeGenerator()
    meters.watch(generator)
    assert not any(name.startswith("llorch:replica") for name, *_ in scrape(meters))
    generator.close()
