"""Changes of a JSON document that a fuzzer of bytes would hardly find: one value for another, somewhere in
it.
"""

from __future__ import annotations

import json
import random
from typing import Any, Final

_MAX_BYTES: Final = 2**16
_VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64, 10**30, 0.5, -0.0, 1e-45, 1e308,
    float("nan"), float("inf"), "", " ", "a", "default", "\ud800", "\x00", "\U0001f642", "<|turn|>", "../../etc/passwd", "/", "1e999",
    "a" * 5000, [], {}, [[]], [0] * 1000, [None], ["a", "a"], {"": ""}, {"a": {"a": {}}},
)  # fmt: skip


def mutate(data: bytes, seed: int) -> bytes | None:
    """Return the document with one or a few values changed, or None if the bytes are no JSON document of a
    fitting size.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    rng = random.Random(seed)
    try:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            document = _changed(document, rng)
        found = json.dumps(document).encode()
    except (ValueError, RecursionError):
        return None
    return found if len(found) <= _MAX_BYTES else None


def _changed(document: Any, rng: random.Random) -> Any:
    places = list(_places(document))
    if not places:
        return _copy(rng.choice(_VALUES))
    container, key = rng.choice(places)
    action = rng.randrange(8)
    if action == 0:
        del container[key]
    elif action == 1 and isinstance(container, list):
        container.insert(key, _copy(container[key]))
    elif action == 1:
        container[rng.choice(("", "a", key + "x", key.upper()))] = _copy(container[key])
    elif action == 2:
        other, name = rng.choice(places)
        container[key] = _copy(other[name])
    elif action == 3 and isinstance(container[key], str):
        text = container[key]
        at = rng.randrange(len(text) + 1)
        container[key] = (
            text[:at]
            + rng.choice(("\\", "(", "*", "\u0130", "\ufb01", "\uff1c", text, "x" * 300))
            + text[at:]
        )
    elif action == 3 and isinstance(container[key], int | float):
        container[key] = container[key] * rng.choice((-1, 2, 10**6)) + rng.choice((-1, 0, 1))
    elif action == 4:
        container[key] = [_copy(container[key]) for _ in range(rng.choice((1, 2, 50)))]
    elif action == 5:
        value = container[key]
        for _ in range(rng.choice((3, 50, 500))):
            value = rng.choice(([value], {"type": "Sequence", "a": value}))
        container[key] = value
    else:
        container[key] = _copy(rng.choice(_VALUES))
    return document


def _copy(value: Any) -> Any:
    """Return a value of its own, so that a document never holds one twice, or itself."""
    return json.loads(json.dumps(value))


def _places(value: Any) -> Any:
    """Give every place of a document, as its container and key."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        keys = (
            list(found) if isinstance(found, dict) else range(len(found)) if isinstance(found, list) else ()
        )
        for key in keys:
            yield found, key
            waiting.append(found[key])
