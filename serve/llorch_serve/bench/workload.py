"""The work that a benchmark gives to every stream: a prompt of so many tokens, then so many greedy tokens."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import msgspec

from llorch_serve.errors import UsageError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.requests import GenerationRequest, Prompt, TextPrompt, TokenPrompt
from llorch_serve.sampling.params import SamplingParams

MAX_PROMPT_FILE_BYTES = 64 * 2**20


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


def read_prompt(path: Path) -> tuple[int, ...]:
    """Read token ids from a JSON array. Raises UsageError if the file holds something else."""
    try:
        if path.stat().st_size > MAX_PROMPT_FILE_BYTES:
            raise UsageError(
                f"{path} has over {MAX_PROMPT_FILE_BYTES} bytes; expected a JSON array of token ids"
            )
        ids = msgspec.json.decode(path.read_bytes(), type=tuple[int, ...])
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); --prompt-ids names a JSON array of token ids"
        ) from error
    except NOT_JSON as error:
        raise UsageError(f"{path} is not a JSON array of token ids: {error}") from error
    if not ids:
        raise UsageError(f"{path} holds an empty array; at least one token id is needed")
    return ids
