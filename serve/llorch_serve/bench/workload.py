"""The work that a benchmark gives to every stream: a prompt of so many tokens, then so many greedy tokens."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files

from llorch_serve.errors import UsageError
from llorch_serve.requests import GenerationRequest, Prompt, TextPrompt, TokenPrompt
from llorch_serve.sampling.params import SamplingParams


@dataclass(slots=True)
class Workload:
    """One stream's work. Greedy, stop tokens ignored, so that every run does the same.

    vocab_size: ids that a prompt may hold. The first token of each prompt is another one, from a random one
        on, so that
    no request starts from the cached prefix of another, or of another benchmark on the same worker.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    vocab_size: int
    _first: Iterator[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._first = itertools.count(secrets.randbelow(self.vocab_size))

    def request(self, request_id: str) -> GenerationRequest:
        """Return a request that does this work."""
        first = next(self._first) % self.vocab_size
        return greedy_request(request_id, (first, *self.prompt_ids[1:]), self.max_tokens)


def greedy_request(request_id: str, token_ids: tuple[int, ...], max_tokens: int) -> GenerationRequest:
    """Return a request for so many greedy tokens after a prompt, whatever stop tokens are among them."""
    sampling = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(request_id, TokenPrompt(token_ids), sampling)


def sample_text() -> str:
    """Return the English text that benchmarks and fidelity checks read; about 2,000 tokens."""
    return files("llorch_serve.bench").joinpath("text.txt").read_text(encoding="utf-8")


def text_prompt(count: int, tokenize: Callable[[Prompt], tuple[tuple[int, ...], str]]) -> tuple[int, ...]:
    """Return the first ``count`` tokens of the sample text, which is repeated as often as needed."""
    if count < 1:
        raise UsageError(f"--prompt-tokens is {count}; at least 1 is needed")
    ids, _ = tokenize(TextPrompt(sample_text()))
    return tuple(ids[i % len(ids)] for i in range(count))
