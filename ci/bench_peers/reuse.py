"""What llorch gains over itself: guesses from the text, and a prefix that the cache holds.

``python -m bench_peers.reuse ARTIFACT THREADS TOKENS PREFIX_TOKENS`` runs one round in a process of its own
and prints one :class:`Gains` as JSON. With and without take turns on two workers that are loaded together, of
which one is idle.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.bench.workload import text_prompt
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.loading.worker import load_worker
from llorch_serve.requests import GenerationRequest, Prompt, TextPrompt, TokenPrompt
from llorch_serve.runtime.opening import open_session
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.local import stream
from llorch_serve.worker.worker import Worker

LOOKUP: Final = 16
TAIL: Final = 16
"""Tokens behind the shared prefix, other ones in each request."""

PROMPTS: Final = ("code_edit", "summary")
"""Texts of :mod:`bench_peers.prompts` whose continuation repeats them: an edited file, a summary with
quotes.
"""

_CONTEXT: Final = 2048


class Tie(msgspec.Struct, frozen=True):
    """Where two answers part. gap: between the logits of the two tokens there, computed anew from the shared
    beginning.
    """

    position: int
    gap: float


class LookupGain(msgspec.Struct, frozen=True):
    """One text, decoded with and without guesses. parted: None if all ids are the same."""

    prompt: str
    plain_tokens_per_s: float
    lookup_tokens_per_s: float
    drafted: int
    accepted: int
    parted: Tie | None


class Gains(msgspec.Struct, frozen=True):
    """One round. Times to first token in milliseconds; reused_tokens: what the second request found in the
    cache.
    """

    lookup: list[LookupGain]
    first_ttft_ms: float
    second_ttft_ms: float
    prefix_tokens: int
    reused_tokens: int


class _Answer(msgspec.Struct, frozen=True):
    ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    tokens_per_s: float
    ttft_ms: float
    drafted: int
    accepted: int
    cached: int


def main() -> None:
    """Measure one round as the command line says."""
    folder, threads, tokens, prefix_tokens = sys.argv[1:]
    found = measure(Path(folder), int(threads), int(tokens), int(prefix_tokens))
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")


def measure(folder: Path, threads: int, tokens: int, prefix_tokens: int) -> Gains:
    """Run one round: every text, then the prefix."""
    session = SessionConfig(threads=threads, slots=2, max_context=_CONTEXT)
    plain = load_worker(folder, EngineConfig(session=session), lambda report: None)
    guessing = load_worker(folder, EngineConfig(session=session, lookup=LOOKUP), lambda report: None)
    with closing(plain), closing(guessing):
        plain.warm_up()
        guessing.warm_up()
        gains = [
            _lookup_gain(name, folder, session, plain=plain, guessing=guessing, tokens=tokens)
            for name in PROMPTS
        ]
        prefix = text_prompt(prefix_tokens + 2 * TAIL, plain.tokenize)
        head = prefix[:prefix_tokens]
        first = _answer(plain, TokenPrompt((*head, *prefix[prefix_tokens:-TAIL])), 2)
        second = _answer(plain, TokenPrompt((*head, *reversed(prefix[-TAIL:]))), 2)
    return Gains(gains, first.ttft_ms, second.ttft_ms, prefix_tokens, second.cached)


def _lookup_gain(
    name: str, folder: Path, session: SessionConfig, *, plain: Worker, guessing: Worker, tokens: int
) -> LookupGain:
    text = files("bench_peers").joinpath("prompts", f"{name}.txt").read_text(encoding="utf-8")
    prompt = TextPrompt(text.rstrip("\n"))
    # The prompt is computed anew by both, but for what a first request has left; decoding alone is compared.
    without, with_ = _answer(plain, prompt, tokens), _answer(guessing, prompt, tokens)
    return LookupGain(
        prompt=name,
        plain_tokens_per_s=without.tokens_per_s,
        lookup_tokens_per_s=with_.tokens_per_s,
        drafted=with_.drafted,
        accepted=with_.accepted,
        parted=_tie(without, with_, folder, session),
    )


def _answer(worker: Worker, prompt: Prompt, tokens: int) -> _Answer:
    sampling = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    first: float | None = None
    ids: list[int] = []
    for update in stream(worker, GenerationRequest("one", prompt, sampling)):
        if update.token_ids and first is None:
            first = time.perf_counter() - started
        ids += update.token_ids
        done = update.completion
    assert first is not None, "at least two tokens are asked for"
    assert done is not None, "the last update of a request that did not fail has it"
    return _Answer(
        ids=tuple(ids),
        prompt_ids=worker.tokenize(prompt)[0],
        tokens_per_s=(done.generated_tokens - 1) / done.timings.decode_s,
        ttft_ms=1000 * first,
        drafted=done.drafted_tokens,
        accepted=done.accepted_tokens,
        cached=done.cached_tokens,
    )


def _tie(one: _Answer, other: _Answer, folder: Path, config: SessionConfig) -> Tie | None:
    for position, (left, right) in enumerate(zip(one.ids, other.ids, strict=True)):
        if left != right:
            session = open_session(load_artifact(folder), config, lambda report: None)
            logits = session.prefill(0, one.prompt_ids + one.ids[:position], 0)[0]
            return Tie(position, abs(float(logits[left] - logits[right])))
    return None


if __name__ == "__main__":
    main()
