"""What guesses give: the same requests to two workers in this process, of which one guesses.

    ci/measurement drafts ARTIFACT DRAFT [TOKENS]
    ci/measurement drafts ARTIFACT lookup [TOKENS]

The workers take turns, greedy and sampled, at 1, 4 and 8 streams, each with its own text behind ones that are
repeated by their answers (``bench_peers/prompts``) and ones that are not. Prints a line of JSON for each: the
tokens in a second of decoding of all streams together, by the clock and by the processor's time; how many
guesses were made and were right; and how many answers part from those without guesses, as they may where two
tokens are nearly as likely.
"""

from __future__ import annotations

import queue
import statistics
import sys
import time
from contextlib import closing
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.loading.worker import load_worker
from llorch_serve.requests import GenerationRequest, GenerationUpdate, TextPrompt
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.worker.worker import Worker

STREAMS: Final = (1, 4, 8)
ROUNDS: Final = 3
_LOOKUP: Final = 16
_CONTEXT: Final = 2048
_ASKED: Final = (
    "What is the capital of France, and what is it known for?",
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Give me a recipe for a simple vegetable soup.",
    "How does a bicycle stay upright while it is moving?",
    "List the steps to plant a tomato and keep it alive.",
    "Who was Marie Curie? Answer in one paragraph.",
    "Describe a quiet morning in a small fishing village.",
)


class Found(msgspec.Struct, frozen=True):
    """One kind of text at one number of streams. Speeds: medians of rounds, in tokens a second."""

    text: str
    sampled: bool
    streams: int
    plain_tokens_per_s: float
    guessing_tokens_per_s: float
    ratio: float
    ratios: tuple[float, ...]
    ratio_of_processor_time: float
    drafted: int
    accepted: int
    parted: int


class _Moments:
    """Takes updates, with the moment at which each came."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[float, GenerationUpdate]] = queue.SimpleQueue()

    def deliver(self, updates: list[GenerationUpdate]) -> None:
        now = time.perf_counter()
        for update in updates:
            self.queue.put((now, update))


class _Run(msgspec.Struct, frozen=True):
    ids: list[tuple[int, ...]]
    tokens_per_s: float
    processor_s: float
    drafted: int
    accepted: int


def main() -> None:
    """Measure as the command line says."""
    folder, guesser, *rest = sys.argv[1:]
    tokens = int(rest[0]) if rest else 128
    session = SessionConfig(slots=max(STREAMS), max_context=_CONTEXT)
    usual = EngineConfig(session=session, prefix_cache=False)
    more = {"lookup": _LOOKUP} if guesser == "lookup" else {"draft": Path(guesser)}
    guessing = replace(usual, **more)
    plain_worker = load_worker(Path(folder), usual, _quiet)
    with closing(plain_worker), closing(load_worker(Path(folder), guessing, _quiet)) as guessing_worker:
        for worker in (plain_worker, guessing_worker):
            worker.warm_up()
        for text in ("questions", "code_edit", "summary"):
            for sampled in (False, True):
                for streams in STREAMS:
                    found = measure(plain_worker, guessing_worker, text, tokens, sampled, streams)
                    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
                    sys.stdout.flush()


def measure(plain: Worker, guessing: Worker, text: str, tokens: int, sampled: bool, streams: int) -> Found:
    """Run a kind of text at a number of streams, by turns."""
    requests = [_request(plain, text, index, tokens, sampled=sampled) for index in range(streams)]
    pairs = [(_run(plain, requests), _run(guessing, requests)) for _ in range(ROUNDS)]
    ratios = tuple(round(with_.tokens_per_s / without.tokens_per_s, 3) for without, with_ in pairs)
    without, with_ = pairs[-1]
    return Found(
        text=text,
        sampled=sampled,
        streams=streams,
        plain_tokens_per_s=round(statistics.median([pair[0].tokens_per_s for pair in pairs]), 1),
        guessing_tokens_per_s=round(statistics.median([pair[1].tokens_per_s for pair in pairs]), 1),
        ratio=statistics.median(list(ratios)),
        ratios=ratios,
        ratio_of_processor_time=round(
            statistics.median([pair[0].processor_s for pair in pairs])
            / statistics.median([pair[1].processor_s for pair in pairs]),
            3,
        ),
        drafted=sum(pair[1].drafted for pair in pairs),
        accepted=sum(pair[1].accepted for pair in pairs),
        parted=sum(left != right for left, right in zip(without.ids, with_.ids, strict=True)),
    )


def _request(worker: Worker, text: str, index: int, tokens: int, *, sampled: bool) -> GenerationRequest:
    if text == "questions":
        asked = f"<|im_start|>user\n{_ASKED[index]}<|im_end|>\n<|im_start|>assistant\n"
    else:
        body = files("bench_peers").joinpath("prompts", f"{text}.txt").read_text(encoding="utf-8")
        asked = f"{index + 1}. {body.rstrip()}"
    sampling = SamplingParams(
        temperature=1.0 if sampled else 0.0,
        seed=index,
        repetition_penalty=1,
        max_tokens=tokens,
        ignore_eos=True,
    )
    return GenerationRequest(f"{text}-{index}", TextPrompt(asked), sampling)


def _run(worker: Worker, requests: list[GenerationRequest]) -> _Run:
    """Run requests together. Decoding begins when all of them have their first token."""
    started, sink = time.process_time(), _Moments()
    for request in requests:
        worker.submit(request, sink)
    came: list[tuple[float, GenerationUpdate]] = []
    while sum(update.is_last for _, update in came) < len(requests):
        came.append(sink.queue.get())
        if came[-1][1].error is not None:
            raise came[-1][1].error
    processor = time.process_time() - started
    first: dict[str, float] = {}
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for at, update in came:
        if update.token_ids:
            first.setdefault(update.request_id, at)
        ids[update.request_id] += update.token_ids
    begin = max(first.values())
    later = sum(len(update.token_ids) for at, update in came if at > begin)
    done = [update.completion for _, update in came if update.completion is not None]
    return _Run(
        ids=[tuple(found) for found in ids.values()],
        tokens_per_s=later / (came[-1][0] - begin),
        processor_s=processor,
        drafted=sum(each.drafted_tokens for each in done),
        accepted=sum(each.accepted_tokens for each in done),
    )


def _quiet(_report: object) -> None:
    """Say nothing of what loading decided."""


if __name__ == "__main__":
    main()
