"""A real worker on tiny models: an answer is the same bits whoever else is there, where that is promised."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.options import ExportOptions, Rule
from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.loading.worker import load_worker
from llorch_serve.sampling.logprobs import TokenLogprobs
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import write_gguf, write_hf_folder
from support.builders.tiny_exports import export_tiny, random_ids
from support.harness.worker import Sink, ask, request
from support.oracles.gguf_blocks import random_blocks
from support.oracles.ties import TIE, Tie, parting

SLOTS = 33
PROMPT = random_ids(91, seed=3)  # an odd rest after chunks of 32 and of 64
TOKENS = 20
TRANSFORMS = ("rotate", "hadamard")

OWN_PROMPTS = ExportOptions(
    "",
    Path(),
    precision="int8",
    activations="row",
    rules=(Rule(("*.mlp.down_proj",), activations="block"),),
    kv_dtype="float32",
    transforms=TRANSFORMS,
)


@dataclass(frozen=True, slots=True)
class Row:
    """An export, and how a session keeps the promise on it."""

    options: dict[str, Any]
    flag: bool = False
    kv_dtype: Any = None


ROWS = {
    "fp32": Row({"precision": "fp32"}),
    "int8": Row({"precision": "int8"}, kv_dtype="float32"),
    "as by default": Row(
        {"precision": "int8", "kv_dtype": "int8", "transforms": TRANSFORMS, "prompts": OWN_PROMPTS}
    ),
    "int8 in large blocks": Row({"precision": "int8", "block_size": 128}, flag=True, kv_dtype="float32"),
    "int4": Row({"precision": "int4"}, flag=True, kv_dtype="float32"),
    "int4 over int8": Row({"precision": "int4", "head_precision": "int4", "kv_dtype": "int8"}, flag=True),
    "a GGUF file's blocks": Row({"precision": "source"}, flag=True, kv_dtype="float32"),
    "int4 in floats": Row(
        {"precision": "int4", "head_precision": "int4", "accuracy_level": 0}, flag=True, kv_dtype="float32"
    ),
}


def _four_bits(name: str, rows: int, columns: int) -> tuple[str, Any]:
    return "Q4_0", random_blocks("Q4_0", rows, columns, seed=len(name) + rows)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(
        tmp_path_factory.mktemp("determinism") / "source", {"max_position_embeddings": 256}
    )


@pytest.fixture(scope="module")
def int4(source: Path) -> Artifact:
    return export_tiny(source, source.parent / "int4", precision="int4")


@pytest.fixture(scope="module", params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


@pytest.fixture(scope="module")
def artifact(row: Row, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    if row.options["precision"] == "source":
        shape = {"max_position_embeddings": 256, "tie_word_embeddings": True}
        source = write_gguf(tmp_path_factory.mktemp("row") / "tiny.gguf", shape, blocks=_four_bits)
    return export_tiny(source, tmp_path_factory.mktemp("row") / "artifact", **row.options)


@contextlib.contextmanager
def working(artifact: Artifact, row: Row, *, slots: int = SLOTS, **config: Any) -> Iterator[Worker]:
    session = SessionConfig(threads=1, slots=slots, kv_dtype=row.kv_dtype, batch_invariant=row.flag)
    options = replace(EngineConfig(session=session, prefill_chunk=64, prefix_cache=False), **config)
    worker = load_worker(artifact.folder, options, lambda _report: None)
    try:
        yield worker
    finally:
        worker.close()


@pytest.fixture(scope="module")
def worker(artifact: Artifact, row: Row) -> Iterator[Worker]:
    with working(artifact, row) as opened:
        yield opened


Bits = tuple[list[int], list[list[tuple[int, float]]]]
"""Ids, and at each place the chosen and the twenty likeliest tokens with their log-probabilities, each a sum
over all logits.
"""

GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 1.3, "seed": 11, "top_k": 50}


def places(answer: Any) -> list[TokenLogprobs]:
    return [place for update in answer.updates for place in update.logprobs]


def bits(answer: Any) -> Bits:
    return answer.ids, [
        [(token.token_id, token.logprob) for token in (place.chosen, *place.top)] for place in places(answer)
    ]


def asked(name: str = "r", **sampling: Any) -> dict[str, Any]:
    return {"name": name, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 20, **sampling}


def alone(worker: Worker, **sampling: Any) -> Bits:
    return bits(ask(worker, PROMPT, **asked(**sampling)))


def among(worker: Worker, neighbours: int, **sampling: Any) -> Bits:
    """Return the answer of a request that joins late, while neighbours start, end and are aborted."""
    sink = Sink()
    names = [f"n{index}" for index in range(neighbours)]
    aborts = []
    for index, name in enumerate(names):
        # The first outlasts the answer; of the others some end before it.
        length = 60 if index == 0 else 3 + index % 12
        prompt = random_ids(5 + 13 * index % 80, seed=100 + index)
        how = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0}
        aborts.append(worker.submit(request(name, prompt, max_tokens=length, ignore_eos=True, **how), sink))
    sink.next()  # some are running
    options = asked("r", **sampling)
    worker.submit(request(options.pop("name"), PROMPT, **options), sink)
    for _ in range(3):
        sink.next()
    for abort in aborts[1::3]:
        abort()
    return bits(sink.answers("r", *names)["r"])


@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("neighbours", [1, 2, 7, 32])
def test_neighbours_change_no_bit(worker: Worker, neighbours: int, how: dict[str, Any]) -> None:
    assert worker.model_info().batch_invariant
    assert among(worker, neighbours, **how) == alone(worker, **how)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 33])
def test_every_logit_of_a_step_is_the_same_in_any_batch(worker: Worker, count: int) -> None:
    session = worker._session
    prompts = [random_ids(3 + 5 * slot % 40, seed=slot) for slot in range(count)]
    for slot, prompt in enumerate(prompts):
        session.prefill(slot, prompt, 0, ())
    together = session.decode([7] * count, [len(prompt) + 1 for prompt in prompts]).copy()
    assert together.shape[0] == count
    for slot in {0, count // 2, count - 1}:
        session.prefill(0, prompts[slot], 0, ())
        np.testing.assert_array_equal(session.decode([7], [len(prompts[slot]) + 1])[0], together[slot])


def test_a_prompt_is_the_same_bits_however_it_is_cut(worker: Worker) -> None:
    session = worker._session
    whole = session.prefill(0, PROMPT, 0).copy()
    for cuts in ((64,), (32, 64), (30, 89)):
        edges = (0, *cuts, len(PROMPT))
        for start, end in itertools.pairwise(edges):
            last = session.prefill(1, PROMPT[start:end], start)
        np.testing.assert_array_equal(last, whole)


@pytest.mark.parametrize("rest", [2, 3, 37])
def test_so_is_one_that_fills_the_context(worker: Worker, rest: int) -> None:
    session = worker._session
    full = random_ids(session.capacity.context, seed=8)
    start = len(full) - rest
    whole = session.prefill(0, full, 0, range(start, len(full))).copy()  # a score asks for the last one too
    session.prefill(1, full[:start], 0, ())
    np.testing.assert_array_equal(session.prefill(1, full[start:], start, range(rest)), whole)


def test_cached_and_cold_agree_where_only_prefilled_tokens_are_reused(artifact: Artifact, row: Row) -> None:
    with working(artifact, row, slots=3) as worker:
        cold = alone(worker, **SEEDED)
    with working(artifact, row, slots=3, prefix_cache=True, strict_reuse=True) as worker:
        first = ask(worker, PROMPT, **asked(**SEEDED))
        # The rest after the reused tokens is odd, and even.
        ask(worker, (*PROMPT[:50], 1, 2), "other")
        again = ask(worker, PROMPT, **asked(**SEEDED))
    assert (first.completion.cached_tokens, bits(first)) == (0, cold)
    assert again.completion.cached_tokens == len(PROMPT) - 2
    if row.options.get("kv_dtype") != "int8":
        assert bits(again) == cold
    # what was read from the cache was rounded, so that only distributions agree, within the recipe's limit
    else:
        found, expected = dict(bits(again)[1][0]), dict(cold[1][0])
        common = found.keys() & expected.keys()
        distance = sum(np.exp(expected[token]) * abs(expected[token] - found[token]) for token in common)
        assert 0 < distance < artifact.manifest.recipe.kl_limit


def test_a_full_context_and_an_odd_number_of_slots_are_served(int4: Artifact) -> None:
    with working(int4, ROWS["int4"], slots=3) as worker:
        assert worker.model_info().slots == 3
        context = worker.model_info().context_length
        full = random_ids(context - 1, seed=5)
        sink = Sink()
        for name in ("a", "b", "c"):
            worker.submit(request(name, full, max_tokens=1, ignore_eos=True, logprobs=20), sink)
        found = [bits(answer) for answer in sink.answers("a", "b", "c").values()]
    assert found[0] == found[1] == found[2]


def test_padding_disturbs_no_slot(int4: Artifact) -> None:
    with working(int4, ROWS["int4"], slots=4) as worker:
        session = worker._session
        for slot in range(4):
            session.prefill(slot, random_ids(9, seed=slot), 0, ())
        before = {
            (layer, kind): session.cache.rows(layer, kind, 0, 4).copy()
            for layer in range(session.cache.kv.layers)
            for kind in ("key", "value")
        }
        session.decode([1, 2, 3], [10, 10, 10])  # the slot after them stands in
        session.prefill(3, [4], 9)  # the slot before it does
        for (layer, kind), held in before.items():
            now = session.cache.rows(layer, kind, 0, 4)
            np.testing.assert_array_equal(now[:, :, :9], held[:, :, :9])
            assert not np.array_equal(now[0, :, 9], held[0, :, 9])


def test_int4_without_the_flag_does_depend_on_the_batch(int4: Artifact) -> None:
    with working(int4, replace(ROWS["int4"], flag=False)) as worker:
        assert not worker.model_info().batch_invariant
        session = worker._session
        for slot in (0, 1):
            session.prefill(slot, PROMPT, 0, ())
        length = [len(PROMPT) + 1]
        differing = 0
        for token in range(8):
            single = session.decode([token], length)[0].copy()
            pair = session.decode([token, token], length * 2)
            np.testing.assert_array_equal(pair[0], pair[1])
            differing += not np.array_equal(single, pair[0])
        assert differing > 0
        assert among(worker, 7, **GREEDY) != alone(worker, **GREEDY)


@pytest.mark.parametrize("neighbours", [0, 1, 7])
def test_guesses_change_no_id_but_at_ties(
    source: Path, tmp_path: Path, neighbours: int, record_property: pytest.RecordProperty
) -> None:
    artifact = export_tiny(source, tmp_path / "fp32")
    repeating = [100 + index % 5 for index in range(60)]
    options = asked(**GREEDY) | {"max_tokens": 80}
    with working(artifact, ROWS["fp32"]) as worker:
        plain = ask(worker, repeating, **options)
    with working(artifact, ROWS["fp32"], lookup=8) as worker:
        assert not worker.model_info().batch_invariant
        sink = Sink()
        for index in range(neighbours):
            worker.submit(
                request(f"n{index}", random_ids(9, seed=index), max_tokens=30, ignore_eos=True), sink
            )
        worker.submit(request("r", repeating, **{k: v for k, v in options.items() if k != "name"}), sink)
        guessed = sink.answers("r", *(f"n{index}" for index in range(neighbours)))["r"]
    assert neighbours > 1 or guessed.completion.drafted_tokens > 0
    tie = parting(plain.ids, places(plain), guessed.ids)
    record_property("tie", tie)


def test_a_tie_is_reported_and_more_than_that_is_an_error() -> None:
    def place(gap: float) -> Any:
        one, two = (
            type("Candidate", (), {"token_id": token, "logprob": -1 - token * gap}) for token in (0, 1)
        )
        return type("Place", (), {"chosen": one, "top": (one, two)})

    assert parting([5, 0], [place(0), place(TIE / 2)], [5, 0]) is None
    found = parting([0, 0], [place(1), place(TIE / 2)], [0, 1])
    assert isinstance(found, Tie)
    assert (found.position, round(found.gap, 7)) == (1, TIE / 2)
    with pytest.raises(AssertionError, match="more than a tie"):
        parting([0, 0], [place(1), place(2 * TIE)], [0, 1])
    with pytest.raises(AssertionError, match="not among the likeliest"):
        parting([0], [place(0)], [9])
