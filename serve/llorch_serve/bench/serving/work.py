"""What the requests of a run ask: prompts of the lengths asked for, or those of a file, and how many tokens each generates.

Input: lengths and prompts. Output: an endless row of :class:`Job`. All answers are greedy and go on past stop tokens, so that their
lengths are those asked for and two runs do the same work.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from llorch_serve.errors import UsageError
from llorch_serve.requests import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt

MAX_FILE_BYTES: Final = 256 * 2**20

_RANGE: Final = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


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

    def draw(self, generator: np.random.Generator) -> int:
        """Return one of them."""
        return int(generator.integers(self.low, self.high, endpoint=True))


def read_lengths(flag: str, value: str) -> Lengths:
    """Return the lengths that ``512`` or ``128-1024`` stand for. Raises UsageError."""
    match = _RANGE.fullmatch(value.strip())
    low = 0 if match is None else int(match[1])
    high = low if match is None or match[2] is None else int(match[2])
    if not 1 <= low <= high:
        raise UsageError(
            f"{flag} is {value!r}; expected a number of tokens, at least 1, or two with the smaller first, like 128-1024"
        )
    return Lengths(low, high)


def drawn_jobs(
    prompt_lengths: Lengths, token_lengths: Lengths, ids: Sequence[int], vocab_size: int, seed: int
) -> Iterator[Job]:
    """Yield jobs whose prompts begin like ``ids``, which has at least as many as the longest takes.

    Lengths are drawn with ``seed``. The first token of each prompt is another one, from a random one on, so that no
    request starts from the cached prefix of another, or of another run on the same worker.
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


def listed_jobs(rows: Sequence[Row], token_lengths: Lengths, seed: int) -> Iterator[Job]:
    """Yield the rows of a file in their order, from the first again after the last."""
    generator = np.random.default_rng(seed)
    for row in itertools.cycle(rows):
        drawn = token_lengths.draw(generator)  # of every row, so that a row's own number shifts no other's
        yield Job(row.prompt, drawn if row.max_tokens is None else row.max_tokens)


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int] | None = None
    messages: list[_Message] | None = None
    max_tokens: int | None = None


def read_rows(path: Path) -> list[Row]:
    """Read a file of prompts: a JSON object each line, with ``prompt`` (a text, or token ids) or ``messages``, and ``max_tokens`` or not.

    Raises UsageError, with the number of the line that is something else.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} has over {MAX_FILE_BYTES} bytes; split it, and measure a part")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}); --dataset names a file with a JSON object each line"
        ) from error
    rows = [_read_row(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UsageError(f"{path} holds no prompt; expected a JSON object each line")
    return rows


def _read_row(where: str, line: bytes) -> Row:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
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
