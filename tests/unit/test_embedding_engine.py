"""The engine that embeds texts, and the worker around it, with a session that has no model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.artifact.manifest import EmbeddingForm
from llorch_serve.config import CacheSharing, EngineConfig
from llorch_serve.engine.embedding import BATCH_TOKENS, EmbeddingEngine, choose_batch
from llorch_serve.engine.sequence import FinishReason, Limits, Ownership, Sequence
from llorch_serve.engine.waiting import WaitingQueue
from llorch_serve.errors import (
    EngineStoppedError,
    InvalidRequestError,
    NonFiniteLogitsError,
    ProviderError,
    QueueFullError,
    UnsupportedError,
    UsageError,
)
from llorch_serve.loading.worker import load_any
from llorch_serve.requests import (
    ChatMessage,
    ChatPrompt,
    EmbedRequest,
    GenerationRequest,
    ScoreRequest,
    TextPrompt,
    TokenPrompt,
)
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.embedding_worker import EmbeddingWorker
from llorch_serve.worker.embeddings import MAX_NUMBERS, MAX_TEXTS
from llorch_serve.worker.local import embed
from llorch_serve.worker.prompts import PromptEncoder
from support.builders.tiny_artifact import tiny_manifest, write_tiny_artifact
from support.fakes.embedder import SIZE, FakeEmbedder, vector_of

EFFECTIVE = {"session", "max_waiting", "max_waiting_tokens", "served_names"}
"""Settings of an engine that count where texts are embedded."""


def sequence(length: int, *, client: str = "", name: str = "r", priority: int = 0) -> Sequence:
    ids = [len(client) * 100 + length] * length
    return Sequence(name, ids, length, Limits(0), ownership=Ownership(client, priority=priority))


def queue(*sequences: Sequence) -> WaitingQueue:
    waiting = WaitingQueue(10_000)
    waiting.add(*sequences)
    return waiting


def lengths(batch: list[Sequence]) -> list[int]:
    return [each.prompt_length for each in batch]


def test_a_batch_is_of_texts_of_about_one_length() -> None:
    first = sequence(20)
    waiting = queue(first, *(sequence(n) for n in (400, 21, 5, 19, 22, 3, 20)))
    assert sorted(lengths(choose_batch(first, waiting))) == [19, 20, 20, 21, 22]
    alone = sequence(400)
    assert lengths(choose_batch(alone, queue(alone, first))) == [400]


def test_a_batch_is_full_of_tokens_and_a_long_text_runs_alone() -> None:
    first = sequence(64)
    full = choose_batch(first, queue(first, *(sequence(64) for _ in range(100))))
    assert sum(lengths(full)) == BATCH_TOKENS
    long = sequence(2 * BATCH_TOKENS)
    assert lengths(choose_batch(long, queue(long, sequence(2 * BATCH_TOKENS)))) == [2 * BATCH_TOKENS]


def test_every_text_of_a_batch_is_padded_by_an_eighth_at_most() -> None:
    rng = np.random.default_rng(0)
    texts = [sequence(int(n)) for n in rng.integers(1, 300, 200)]
    waiting = queue(*texts)
    while (first := waiting.next()) is not None:
        batch = choose_batch(first, waiting)
        size = max(lengths(batch)) * len(batch)
        assert first in batch
        assert size - sum(lengths(batch)) <= size / 8
        for each in batch:
            waiting.take(each)
            waiting.leave(each)


def test_clients_take_turns_and_what_is_aborted_is_not_run() -> None:
    session = FakeEmbedder()
    engine = EmbeddingEngine(session, WaitingQueue(100))
    many = [sequence(600, client="many") for _ in range(3)]
    one = sequence(500, client="one")
    engine.add(*many)
    engine.add(one)
    assert engine.abort(many[1])
    assert not engine.abort(many[1])
    ended = []
    while engine.live:
        ended += engine.step()
    assert [event.sequence for event in ended] == [many[0], one, many[2]]
    for event in ended:
        assert event.embedding is not None
        np.testing.assert_array_equal(event.embedding, vector_of(event.sequence.token_ids))
    assert engine.step() == []
    assert engine.load().prompt_tokens == 1700


def test_a_failing_call_ends_its_batch_and_a_spoiled_vector_its_text() -> None:
    session = FakeEmbedder()
    engine = EmbeddingEngine(session, WaitingQueue(100))
    texts = [sequence(5, client=name) for name in ("a", "bb", "ccc")]
    session.spoiled.add(tuple(texts[1].token_ids))
    engine.add(*texts)
    events = engine.step()
    assert [event.finish for event in events if event.sequence is not texts[1]] == [FinishReason.STOP] * 2
    (bad,) = [event.error for event in events if event.sequence is texts[1]]
    assert isinstance(bad, NonFiniteLogitsError)
    session.fail = ProviderError("broken")
    engine.add(sequence(5))
    (event,) = engine.step()
    assert event.error is session.fail
    assert not engine.live


# The worker


@pytest.fixture
def session() -> FakeEmbedder:
    return FakeEmbedder()


@pytest.fixture
def worker(tmp_path: Path, session: FakeEmbedder) -> Iterator[EmbeddingWorker]:
    made = make(tmp_path, session)
    yield made
    made.close()


def make(folder: Path, session: FakeEmbedder, *, normalised: bool = True, **config: Any) -> EmbeddingWorker:
    form = EmbeddingForm(pooling="last", normalised=normalised)
    artifact = load_artifact(write_tiny_artifact(folder, tiny_manifest(embedding=form)))
    prompts = PromptEncoder(artifact, Tokenizer.load(artifact.tokenizer_path))
    return EmbeddingWorker(artifact, session, prompts, EngineConfig(**config))


def request(*inputs: Any, **fields: Any) -> EmbedRequest:
    texts = (TextPrompt(each) if isinstance(each, str) else TokenPrompt(tuple(each)) for each in inputs)
    return EmbedRequest(fields.pop("name", "r"), tuple(texts), **fields)


def test_vectors_come_in_the_order_of_their_texts(worker: EmbeddingWorker) -> None:
    ids = worker.tokenize(TextPrompt("The quick brown fox"))[0]
    found = embed(worker, request("The quick brown fox", [9, 8, 7], "The quick brown fox", list(range(40))))
    wanted = [ids, (9, 8, 7), ids, tuple(range(40))]
    assert [each.token_count for each in found] == [len(each) for each in wanted]
    for each, text in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(each.values, vector_of(text))


def test_dimensions_cut_a_vector_and_give_it_length_one_again(
    tmp_path: Path, worker: EmbeddingWorker
) -> None:
    (found,) = embed(worker, request([5, 6], dimensions=8))
    whole = vector_of([5, 6])
    np.testing.assert_allclose(found.values, whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-6)
    plain = make(tmp_path / "plain", FakeEmbedder(), normalised=False)
    (found,) = embed(plain, request([5, 6], dimensions=8))
    np.testing.assert_array_equal(found.values, whole[:8])
    plain.close()


@pytest.mark.parametrize(
    ("asked", "field", "found"),
    [
        (request(), "inputs", "found 0 texts"),
        (request(*[[1]] * (MAX_TEXTS + 1)), "inputs", f"found {MAX_TEXTS + 1} texts"),
        (request([1], dimensions=0), "dimensions", "expected 1 to 64"),
        (request([1], dimensions=65), "dimensions", "expected 1 to 64"),
        (request([1], truncate_prompt_tokens=0), "truncate_prompt_tokens", "expected 1 to 48, or -1"),
        (request([1], truncate_prompt_tokens=49), "truncate_prompt_tokens", "expected 1 to 48, or -1"),
        (request([1], [1] * 49), "inputs[1]", "found 49 tokens, expected at most 48"),
        (request([1], "x " * 60), "inputs[1]", "tokens, expected at most 48"),
        (request([1], []), "inputs[1]", "empty prompt"),
        (request([512]), "inputs[0]", "0 to 511"),
        (request([-1]), "inputs[0]", "0 to 511"),
        (request("\ud800"), "inputs[0]", "surrogate"),
    ],
)
def test_bad_requests_are_refused_by_field(
    worker: EmbeddingWorker, session: FakeEmbedder, asked: EmbedRequest, field: str, found: str
) -> None:
    with pytest.raises(InvalidRequestError) as error:
        embed(worker, asked)
    assert error.value.violations[0].field == field
    assert found in error.value.violations[0].description
    assert session.batches == []


def test_an_answer_stays_within_a_message(tmp_path: Path) -> None:
    manifest = tiny_manifest(embedding=EmbeddingForm(pooling="last"))
    wide = tiny_manifest(
        embedding=manifest.embedding,
        model=type(manifest.model)(**{**_fields(manifest.model), "hidden_size": 4096}),
    )
    artifact = load_artifact(write_tiny_artifact(tmp_path, wide))
    prompts = PromptEncoder(artifact, Tokenizer.load(artifact.tokenizer_path))
    worker = EmbeddingWorker(artifact, FakeEmbedder(), prompts, EngineConfig())
    with pytest.raises(InvalidRequestError, match=f"send at most {MAX_NUMBERS // 4096} at once"):
        embed(worker, request(*[[1]] * 513))
    worker.close()


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_long_texts_are_cut_where_that_is_asked_for(worker: EmbeddingWorker, session: FakeEmbedder) -> None:
    text = "The quick brown fox jumps over the lazy dog " * 40
    ids = worker._tokenizer.encode(text, add_special_tokens=True)
    assert len(ids) > 48
    (whole, short, given) = (
        embed(worker, request(text, truncate_prompt_tokens=-1)),
        embed(worker, request(text, "a", truncate_prompt_tokens=5)),
        embed(worker, request(list(range(99)), truncate_prompt_tokens=5)),
    )
    np.testing.assert_array_equal(whole[0].values, vector_of(ids[:48]))
    np.testing.assert_array_equal(short[0].values, vector_of(ids[:5]))
    assert short[1].token_count < 5
    np.testing.assert_array_equal(given[0].values, vector_of(range(5)))


def test_what_a_tokenizer_puts_behind_a_text_stays_behind_one_that_is_cut(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers.processors import TemplateProcessing

    artifact = load_artifact(
        write_tiny_artifact(tmp_path, tiny_manifest(embedding=EmbeddingForm(pooling="last")))
    )
    library = Library.from_file(str(artifact.tokenizer_path))
    library.post_processor = TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    prompts = PromptEncoder(artifact, Tokenizer.from_json(library.to_str().encode(), origin="t"))
    plain = library.encode("The quick brown fox jumps", add_special_tokens=False).ids
    assert prompts.encode_cut(TextPrompt("The quick brown fox jumps"), 6) == (0, *plain[:4], 1)
    assert prompts.encode_cut(TextPrompt("The"), 40) == (0, *library.encode("The").ids[1:-1], 1)
    with pytest.raises(InvalidRequestError, match="room for 2 tokens"):
        prompts.encode_cut(TextPrompt("The quick brown fox"), 2)


def test_a_conversation_is_embedded_as_the_template_renders_it(worker: EmbeddingWorker) -> None:
    chat = ChatPrompt((ChatMessage("user", "hi"),))
    (found,) = embed(worker, EmbedRequest("r", (chat,)))
    np.testing.assert_array_equal(found.values, vector_of(worker.tokenize(chat)[0]))
    with pytest.raises(InvalidRequestError, match="only texts and token ids are cut"):
        embed(worker, EmbedRequest("r", (chat,), truncate_prompt_tokens=4))


def test_generation_and_scores_are_refused_by_name(worker: EmbeddingWorker, session: FakeEmbedder) -> None:
    sink: Any = None
    for submit in (
        lambda: worker.submit(GenerationRequest("g", TextPrompt("a")), sink),
        lambda: worker.submit_score(ScoreRequest("s", TextPrompt("a"), (TextPrompt("b"),)), sink),
    ):
        with pytest.raises(UnsupportedError, match=r"tiny embeds texts and .*; call Embed or /v1/embeddings"):
            submit()
    assert worker.model_info().embedding_size == SIZE
    assert worker.model_info().capabilities == ("embed", "tokenize")
    assert worker.model_info().limits == ("embeds texts, and neither generates nor scores any",)


@pytest.mark.parametrize("field", sorted({each.name for each in fields(EngineConfig)} - EFFECTIVE))
def test_a_setting_without_effect_is_refused(tmp_path: Path, field: str) -> None:
    form = EmbeddingForm(pooling="last")
    folder = write_tiny_artifact(tmp_path, tiny_manifest(embedding=form))
    usual = getattr(EngineConfig(), field)
    other = {
        bool: lambda: not usual,
        int: lambda: usual + 1,
        str: lambda: "none",
        type(None): lambda: tmp_path / "draft",
    }
    value = CacheSharing.ALL if isinstance(usual, CacheSharing) else other[type(usual)]()
    with pytest.raises(UsageError, match=r"has no effect on .*, whose graph embeds texts"):
        load_any(folder, EngineConfig(**{field: value}), lambda _: None)


def test_an_aborted_request_ends_and_others_go_on(worker: EmbeddingWorker, session: FakeEmbedder) -> None:
    session.gate = threading.Event()
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=_run, args=(worker, name, length, found))
        for name, length in (("running", 4), ("other", 30))
    ]
    threads[0].start()
    assert session.entered.wait(20)
    threads[1].start()
    sink = _Sink()
    abort = worker.submit_embedding(request([7] * 30, [8] * 30, name="aborted"), sink)
    abort()
    session.gate.set()
    for thread in threads:
        thread.join(20)
    assert sink.ended.wait(20)
    assert [type(found[name]) for name in ("running", "other")] == [list, list]
    assert not any((7,) * 30 in batch for batch in session.batches)


class _Sink:
    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None

    def deliver(self, updates: list[Any]) -> None:
        self.error = next((update.error for update in updates if update.error), None)
        if any(update.is_last for update in updates):
            self.ended.set()


def _run(worker: EmbeddingWorker, name: str, length: int, found: dict[str, Any]) -> None:
    found[name] = embed(worker, request([length] * length, name=name))


def test_a_full_queue_and_a_failure_are_told(tmp_path: Path, session: FakeEmbedder) -> None:
    worker = make(tmp_path, session, max_waiting_tokens=50)
    session.gate = threading.Event()
    thread = threading.Thread(target=_run, args=(worker, "first", 40, {}))
    thread.start()
    assert session.entered.wait(20)
    waiting = _Sink()
    worker.submit_embedding(request([1] * 40, name="waits"), waiting)
    refused = _Sink()
    worker.submit_embedding(request([2] * 40, name="refused"), refused)
    session.gate.set()
    thread.join(20)
    assert waiting.ended.wait(20)
    assert refused.ended.wait(20)
    assert isinstance(refused.error, QueueFullError)
    session.fail = ProviderError("broken")
    with pytest.raises(ProviderError, match="broken"):
        embed(worker, request([1]))
    session.fail = None
    assert len(embed(worker, request([1]))) == 1  # the worker goes on
    worker.close()


def test_the_largest_request_leaves_room_for_others(worker: EmbeddingWorker, session: FakeEmbedder) -> None:
    session.gate = threading.Event()
    running, large, other = _Sink(), _Sink(), _Sink()
    worker.submit_embedding(request([1], name="running"), running)
    assert session.entered.wait(20)
    worker.submit_embedding(request(*[[2]] * MAX_TEXTS, name="large"), large)
    worker.submit_embedding(request([3], name="other"), other)
    session.gate.set()
    assert all(sink.ended.wait(20) for sink in (running, large))
    assert other.error is None
    assert other.ended.wait(20)


def test_a_dead_engine_and_a_closed_worker_end_what_runs(tmp_path: Path, session: FakeEmbedder) -> None:
    worker = make(tmp_path, session)
    session.fail = ZeroDivisionError("a fault of ours")
    told = threading.Event()
    worker.when_dead(lambda error: told.set())
    with pytest.raises(EngineStoppedError):
        embed(worker, request([1]))
    assert told.is_set()
    closing = make(tmp_path / "other", FakeEmbedder())
    closing.close()
    with pytest.raises(Exception, match="shutting down"):
        embed(closing, request([1]))
