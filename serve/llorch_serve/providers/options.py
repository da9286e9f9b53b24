"""Options of providers: what type each has, and the reading of ``--provider-option KEY=VALUE``.

onnxruntime takes every value as text and, depending on the provider, ignores what it does not know; so names
and values are checked here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from llorch_serve.errors import ProviderError

_LONGEST: Final = 4096  # characters; a path is the longest that is of use
_LARGEST: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class OptionType:
    """What an option takes. says: for people. accepts: whether a text is such a value."""

    says: str
    accepts: Callable[[str], bool]


def _whole(text: str, least: int) -> bool:
    return text.isascii() and text.isdecimal() and least <= int(text[:20]) <= _LARGEST


INDEX: Final = OptionType("a device's number, 0 and on", lambda text: _whole(text, 0) and int(text) < 1024)
WHOLE: Final = OptionType("a whole number, 0 and on", lambda text: _whole(text, 0))
BYTES: Final = OptionType("a number of bytes", lambda text: _whole(text, 1))
FLAG: Final = OptionType("0 or 1", lambda text: text in ("0", "1"))
TEXT: Final = OptionType("text", lambda text: 0 < len(text) <= _LONGEST and text.isprintable())
LIST: Final = OptionType("names, one a line", lambda text: 0 < len(text) <= _LONGEST)


def choice(*values: str) -> OptionType:
    """Return the type of an option that takes one of these values."""
    return OptionType(" or ".join(values), lambda text: text in values)


def read_options(
    provider: str, known: Mapping[str, OptionType] | None, given: Sequence[str]
) -> dict[str, str]:
    """Return the options in ``KEY=VALUE`` texts.

    known: what the provider takes; None: not known, as of another's plugin, so that nothing is checked but
        the form.
    Raises ProviderError for a text without a key, an unknown or repeated key, or a value that is not of its
    type.
    """
    options: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ProviderError(f"--provider-option is {text!r}; expected KEY=VALUE")
        if key in options:
            raise ProviderError(f"--provider-option {key} is given twice; leave one of them out")
        if known is not None:
            _check(provider, known, key, value)
        options[key] = value
    return options


def _check(provider: str, known: Mapping[str, OptionType], key: str, value: str) -> None:
    if key not in known:
        lowered = {name.lower(): name for name in known}
        close = difflib.get_close_matches(key.lower(), list(lowered), n=1, cutoff=0.5)
        meant = f"did you mean {lowered[close[0]]}? " if close else ""
        takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
        raise ProviderError(f"--provider-option {key} is no option of {provider}; {meant}{takes}")
    if not known[key].accepts(value):
        raise ProviderError(
            f"--provider-option {key} is {value[:80]!r}; {provider} takes {known[key].says} there"
        )
