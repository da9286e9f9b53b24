"""What the plan looks at in a body: how long its answer may take, and what it shares with other lines.

Both are for the order of work alone. A body that nobody understands has a length and shares nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from llorch_serve.files.json_errors import NOT_JSON

_BYTES_PER_TOKEN: Final = 4  # of usual tokenizers and usual text
_USUAL_ANSWER: Final = 256  # tokens, where a line does not say how many at most
_MOST_TOKENS: Final = 2**31
_MOST_DIGITS: Final = len(str(_MOST_TOKENS))
_HASH_BYTES: Final = 3
_NAMES: Final = ("role", "content", "text", "tool_calls", "function", "name", "arguments", "output")


def _ends() -> tuple[int, ...]:
    """Return the lengths at which beginnings are compared, each a quarter more than the one before it: lines
    whose beginnings part between two of them share four fifths of what lines of one group share.
    """
    ends = [64]
    while ends[-1] < 2**20:
        ends.append(ends[-1] * 5 // 4)
    return tuple(ends)


ENDS: Final = _ends()


_ABSENT: Final = msgspec.Raw()


class _Limits(msgspec.Struct):
    """Values as they came: whatever a stranger puts there is not made into objects."""

    stream: msgspec.Raw = _ABSENT
    n: msgspec.Raw = _ABSENT
    max_tokens: msgspec.Raw = _ABSENT
    max_completion_tokens: msgspec.Raw = _ABSENT
    max_output_tokens: msgspec.Raw = _ABSENT


class _Beginning(msgspec.Struct):
    tools: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    instructions: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None


_decode_limits = msgspec.json.Decoder(_Limits).decode
_decode_beginning = msgspec.json.Decoder(_Beginning).decode


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a body promises.

    tokens: of prompt and answer together, by estimate. is_stream: it asks for an answer in pieces.
    """

    tokens: int
    is_stream: bool


def look(body: bytes) -> Outlook:
    """Return what a body promises."""
    try:
        found = _decode_limits(body)
    except NOT_JSON:
        found = _Limits()
    limits = map(_count, (found.max_completion_tokens, found.max_tokens, found.max_output_tokens))
    most = next((limit for limit in limits if limit is not None), _USUAL_ANSWER)
    answers = _count(found.n)
    tokens = len(body) // _BYTES_PER_TOKEN + most * (1 if answers is None else answers)
    return Outlook(min(tokens, _MOST_TOKENS), is_stream=bytes(memoryview(found.stream)[:5]) == b"true")


def beginning_of(body: bytes) -> bytes:
    """Return the text that the model sees first, in UTF-8; nothing where there is none."""
    texts: list[str] = []
    try:
        found = _decode_beginning(body)
        if tools := bytes(found.tools):
            texts.append(tools.decode("utf-8", "replace"))
        for value in (found.instructions, found.messages, found.prompt, found.input):
            _add_texts(value, texts)
    except NOT_JSON:
        return b""
    return "\n".join(texts).encode("utf-8", "replace")


def prefix_key(beginning: bytes) -> bytes:
    """Return a key by whose order lines with equal beginnings lie together, those that share more nearer.

    It is a row of hashes of ever longer beginnings, so that it stays short for texts of any length.
    """
    key = bytearray()
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    done = 0
    for end in ENDS:
        if end > len(beginning):
            break
        digest.update(beginning[done:end])
        key += digest.copy().digest()
        done = end
    return bytes(key)


def _count(value: msgspec.Raw) -> int | None:
    """Return a whole number that makes sense, None for anything else."""
    digits = bytes(memoryview(value)[: _MOST_DIGITS + 1])
    if not digits.isdigit() or len(digits) > _MOST_DIGITS or int(digits) > _MOST_TOKENS:
        return None
    return int(digits)


def _add_texts(value: Any, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, list):
        for item in value:
            _add_texts(item, texts)
    elif isinstance(value, dict):
        for name in _NAMES:
            if name in value:
                _add_texts(value[name], texts)
    elif isinstance(value, int):
        texts.append(str(value))
