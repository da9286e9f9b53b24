"""What the requests of a run ask: prompts of the lengths asked for, or those of a file, and how many tokens
each generates.

Input: lengths and prompts. Output: an endless row of :class:`Job`. All answers are greedy and go on past stop
tokens, so that their lengths are those asked for and two runs do the same work.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from llorch_serve.errors import UsageError
from llorch_serve.files.json_errors import NOT_JSON
from llorch_serve.requests import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

MAX_FILE_BYTES: Final = 256 * 2**20


@dataclass(frozen=True, slots=True)
class Job:
    """One request: its prompt, and exactly how many tokens it generates."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens drawn evenly from ``low`` to ``high``, both included."""

    low: int
    high: int

    @staticmethod
    def around(middle: int, spread: float) -> Lengths:
        """Return the whole numbers, from 1 on, between (1 - spread) and (1 + spread) times ``middle``."""
        reach = spread * middle
        return Lengths(max(1, math.ceil(middle - reach)), math.floor(middle + reach))

    def draw(self, generator: np.random.Generator) -> int:
        """Return one of them."""
        return int(generator.integers(self.low, self.high, endpoint=True))


def drawn_jobs(
    prompt_lengths: Lengths, token_lengths: Lengths, ids: Sequence[int], vocab_size: int, seed: int
) -> Iterator[Job]:
    """Yield jobs whose prompts begin like ``ids``, which has at least as many as the longest takes.

    Lengths are drawn with ``seed``. The first token of each prompt is another one, from a random one on, so
    that no request starts from the cached prefix of another, or of another run on the same worker.
    """
    generator = np.random.default_rng(seed)
    for first in itertools.count(secrets.randbelow(vocab_size)):
        prompt = (first % vocab_size, *ids[1 : prompt_lengths.draw(generator)])
        yield Job(TokenPrompt(prompt), token_lengths.draw(generator))


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file of prompts. max_tokens: None: as the command says."""

    prompt: Prompt
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Dataset:
    """A file of prompts. name: its own, and the beginning of its SHA-256, so that results of other prompts
    are told apart.
    """

    name: str
    rows: tuple[Row, ...]


def listed_jobs(dataset: Dataset, max_tokens: int) -> Iterator[Job]:
    """Yield the rows of a file in their order, from the first again after the last."""
    for row in itertools.cycle(dataset.rows):
        yield Job(row.prompt, max_tokens if row.max_tokens is None else row.max_tokens)


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int] | None = None
    messages: list[_Message] | None = None
    max_tokens: int | None = None


def read_dataset(path: Path) -> Dataset:
    """Read a file of prompts: a JSON object each line, with ``prompt`` (a text, or token ids) or
    ``messages``, and ``max_tokens`` or not.

    Raises UsageError, with the number of the line that is something else.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} has over {MAX_FILE_BYTES} bytes; split it, and measure a part")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); --dataset names a file with a JSON object each line"
        ) from error
    lines = enumerate(data.split(b"\n"), 1)
    rows = tuple(_read_row(f"{path}:{number}", line) for number, line in lines if line.strip())
    if not rows:
        raise UsageError(f"{path} holds no prompt; expected a JSON object each line")
    return Dataset(f"{path.name} {hashlib.sha256(data).hexdigest()[:12]}", rows)


def _read_row(where: str, line: bytes) -> Row:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except NOT_JSON as error:
        raise UsageError(
            f'{where}: {error}; expected an object like {{"prompt": "...", "max_tokens": 64}}'
        ) from error
    if (found.prompt is None) == (found.messages is None):
        raise UsageError(f"{where}: expected either prompt or messages")
    if not (found.prompt or found.messages):
        raise UsageError(f"{where}: the prompt is empty")
    if found.max_tokens is not None and found.max_tokens < 1:
        raise UsageError(f"{where}: max_tokens is {found.max_tokens}; at least 1 is needed")
    return Row(_prompt(found), found.max_tokens)


def _prompt(line: _Line) -> Prompt:
    if isinstance(line.prompt, str):
        return TextPrompt(line.prompt)
    if line.prompt is not None:
        return TokenPrompt(tuple(line.prompt))
    return ChatPrompt(tuple(ChatMessage(message.role, message.content) for message in line.messages or ()))
