"""What the plan looks at in a body: how long its answer may take, and what it shares with other lines.

Both are for the order of work alone. A body that nobody understands has a length and shares nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from llorch_serve.files.json_errors import NOT_JSON

_BYTES_PER_TOKEN: Final = 4  # of usual tokenizers and usual text
_USUAL_ANSWER: Final = 256  # tokens, where a line does not say how many at most
_MOST_TOKENS: Final = 2**31
_HASH_BYTES: Final = 3


def _ends() -> tuple[int, ...]:
    """Return the lengths at which beginnings are compared, each a quarter more than the one before it: lines
    whose beginnings part between two of them share four fifths of what lines of one group share.
    """
    ends = [64]
    while ends[-1] < 2**20:
        ends.append(ends[-1] * 5 // 4)
    return tuple(ends)


ENDS: Final = _ends()


class _Looked(msgspec.Struct):
    stream: Any = None
    tools: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    instructions: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None


_decode = msgspec.json.Decoder(_Looked).decode


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a body promises.

    tokens: of prompt and answer together, by estimate.
    beginning: the text that the model sees first, in UTF-8.
    is_stream: it asks for an answer in pieces.
    """

    tokens: int
    beginning: bytes
    is_stream: bool


def look(body: bytes) -> Outlook:
    """Return what a body promises."""
    try:
        found = _decode(body)
        beginning = "\n".join(_texts(found)).encode("utf-8", "replace")
    except NOT_JSON:
        return Outlook(len(body) // _BYTES_PER_TOKEN, b"", is_stream=False)
    limits = (found.max_completion_tokens, found.max_tokens, found.max_output_tokens)
    most = next((limit for limit in limits if _is_count(limit)), _USUAL_ANSWER)
    answers = found.n if _is_count(found.n) else 1
    tokens = len(beginning) // _BYTES_PER_TOKEN + most * answers
    return Outlook(min(tokens, _MOST_TOKENS), beginning, is_stream=found.stream is True)


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


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS


def _texts(found: _Looked) -> Iterator[str]:
    """Yield the texts of a body in the order in which a model sees them."""
    if tools := bytes(found.tools):
        yield tools.decode("utf-8", "replace")
    for value in (found.instructions, found.messages, found.prompt, found.input):
        yield from _texts_in(value)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)
    elif isinstance(value, dict):
        for name in ("role", "content", "text", "tool_calls", "arguments", "output"):
            yield from _texts_in(value.get(name))
    elif isinstance(value, int):
        yield str(value)
