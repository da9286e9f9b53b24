"""What each thing that a chat template may do costs, known before it is done.

Input: a value, and the method, filter, test or operator that a template puts to it. Output: units of about a
nanosecond of work in Python's own C code, or a byte that is made, whichever is more. What is listed here is
all that a template may call; the sandbox refuses the rest, and what costs too much.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Undefined
from jinja2.utils import Namespace
from markupsafe import Markup

NODE: Final = 200
"""One value among those of a list or dict: looking at it, comparing it, a reference to it."""

MAX_AT_ONCE: Final = 2**26
"""Units of one operation, during which nothing else of the process can run."""

_MAX_NUMBER_CHARS: Final = 1000
_MAX_DIGITS: Final = 64
_LINE_ENDS: Final = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_PERCENT: Final = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")
_WIDE: Final = re.compile(r"\d{5}")
_KEYS: Final[Any] = type({}.keys())
_VALUES: Final[Any] = type({}.values())
_VIEWS: Final[tuple[Any, ...]] = (_KEYS, _VALUES, type({}.items()))
_SIZED: Final[Any] = (list, tuple, dict, range, *_VIEWS)
_LISTS: Final[Any] = (list, tuple, *_VIEWS)

Cost = Callable[[Any, tuple[Any, ...]], int]
"""Of a method or filter, from the value that it is put to and its arguments."""


def is_scalar(value: object) -> bool:
    """Whether a value has no values in it."""
    return value is None or isinstance(value, (str, int, float, Undefined))


def size(value: Any) -> int:
    """Return the cost of copying a value, without what it refers to."""
    if isinstance(value, (str, bytes)):
        return sys.getsizeof(value)
    if isinstance(value, _SIZED):
        return NODE * (1 + len(value))
    return NODE


def weight(value: Any) -> int:
    """Return the cost of looking at a value and all that is in it, as often as it is in it. Raises
    SecurityError beyond MAX_AT_ONCE.
    """
    rest: list[Any] = [value]
    total = 0
    while rest:
        item = rest.pop()
        total += size(item)
        if total > MAX_AT_ONCE:
            raise too_much(total)
        if isinstance(item, dict):
            rest += item.keys()
            rest += item.values()
        elif isinstance(item, _LISTS):
            rest += item
        elif isinstance(item, Namespace):
            rest.append(item._Namespace__attrs)  # shown where it is written
    return total


def too_much(units: int) -> SecurityError:
    """Return the refusal of one operation."""
    return SecurityError(
        f"the template does something that costs {units} at once, where at most {MAX_AT_ONCE} is allowed"
    )


def text(value: Any) -> int:
    """Return the cost of a value as text."""
    return (
        size(value) if isinstance(value, str) else 4 * weight(value)
    )  # a character may need ten to be shown


def comparison(operator: str, left: Any, right: Any) -> int:
    """Return the cost of one of jinja2's comparisons, by the name that it has there. Iterators are lists by
    now.
    """
    if operator in ("in", "notin"):
        return _membership(left, right)
    if isinstance(left, str) and isinstance(right, str):
        return min(size(left), size(right))
    if is_scalar(left) and is_scalar(right):
        return NODE
    if operator in ("eq", "ne") and (is_scalar(left) or is_scalar(right)):
        return NODE
    return weight(left) + weight(right)


def _membership(item: Any, container: Any) -> int:
    if isinstance(container, str):
        return _forward(container, (item,))
    if isinstance(container, (dict, _KEYS)):
        return weight(item)
    if isinstance(container, (list, tuple, _VALUES)) and is_scalar(item):
        return len(container) * (NODE + size(item))
    return weight(container) + weight(item)


def percent(pattern: str, value: Any) -> int:
    """Return the cost of ``pattern % value``. Raises SecurityError for a width above 9999 or a computed
    one.
    """
    total, fields = size(pattern), 0
    for found in _PERCENT.finditer(pattern):
        fields += 1
        total += NODE
        for width in found.groups():
            if width is None:
                continue
            if width == "*" or len(width) > 4:
                raise _too_wide()
            total += 4 * int(width)
        if total > MAX_AT_ONCE:
            raise too_much(total)
    # By name one value may be written many times.
    return total + text(value) * (1 if isinstance(value, tuple) else 1 + fields)


def field(value: Any, spec: str) -> int:
    """Return the cost of one field of ``format``. Raises SecurityError for a width or precision above
    9999.
    """
    if len(spec) > 100 or _WIDE.search(spec):
        raise _too_wide()
    return NODE + 8 * sum(map(int, re.findall(r"\d+", spec))) + text(value)


def _too_wide() -> SecurityError:
    return SecurityError(
        "the template formats with a width above 9999 or a computed one, which is not allowed"
    )


# Methods and filters. ``given``: all arguments, named ones last.


def _free(_value: Any, _given: tuple[Any, ...]) -> int:
    return NODE


def _copy(value: Any, _given: tuple[Any, ...]) -> int:
    return NODE * (1 + len(value)) if isinstance(value, str) else size(value)  # of a text: its characters


def _deep(value: Any, given: tuple[Any, ...]) -> int:
    return weight(value) + weight(given)


def _arguments(_value: Any, given: tuple[Any, ...]) -> int:
    return weight(given)


def _whole(value: Any, given: tuple[Any, ...]) -> int:
    return text(value) + weight(given)


def _recased(value: Any, _given: tuple[Any, ...]) -> int:
    return 4 * text(value)  # one character may become three


def _titled(value: Any, _given: tuple[Any, ...]) -> int:
    return text(value) + NODE * len(value)  # each word is a value of its own for a moment


def _stripped(value: Any, given: tuple[Any, ...]) -> int:
    return text(value) * max(1, *(len(chars) for chars in given if isinstance(chars, str)), 1)


def _texts(given: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(value for value in given if isinstance(value, str))


def _limit(given: tuple[Any, ...], otherwise: int) -> int:
    """Return how often something is done at most, where an argument says so."""
    return min([value for value in given if type(value) is int and value >= 0] + [otherwise])


def _forward(value: str, given: tuple[Any, ...]) -> int:
    """Python looks for short texts in short ones by trying every place, otherwise in linear time."""
    looked_for = _texts(given)[:1]
    places = sum(min(len(value), 30_000) * min(len(needle), 100) for needle in looked_for)
    return 2 * size(value) + weight(given) + places


def _backward(value: str, given: tuple[Any, ...]) -> int:
    """From the end it tries every place always."""
    return 2 * size(value) + weight(given) + sum(len(value) * len(needle) for needle in _texts(given)[:1])


def _split(value: str, given: tuple[Any, ...]) -> int:
    if not _texts(given):
        pieces = len(value) // 2  # words may be single characters
    else:
        pieces = value.count(_texts(given)[0]) if _texts(given)[0] else 0
    return _forward(value, given) + NODE * (1 + _limit(given, pieces))


def _split_backward(value: str, given: tuple[Any, ...]) -> int:
    return _split(value, given) + _backward(value, given)


def _line_ends(value: str) -> int:
    return sum(map(value.count, _LINE_ENDS))


def _lines(value: str, _given: tuple[Any, ...]) -> int:
    return 10 * size(value) + NODE * (1 + _line_ends(value))


def _replaced(value: str, given: tuple[Any, ...]) -> int:
    old, new = (*_texts(given), "", "")[:2]
    times = _limit(given[2:], value.count(old))
    return _forward(value, given) + times * 4 * (1 + len(new))


def _padded(value: str, given: tuple[Any, ...]) -> int:
    return size(value) + sum(4 * abs(width) for width in given if isinstance(width, int)) + weight(given)


def _joined(separator: str, given: tuple[Any, ...]) -> int:
    return _joining(given[0] if given else (), (separator,))


def _joining(values: Any, given: tuple[Any, ...]) -> int:
    separator = given[0] if given else ""
    pieces = _count(values)
    letters = NODE * pieces if isinstance(values, str) else 0
    return (
        4 * weight(values)
        + letters
        + pieces * 4 * (1 + len(str(separator)) if is_scalar(separator) else text(separator))
    )


def _indented(value: str, given: tuple[Any, ...]) -> int:
    width = sum(abs(w) if isinstance(w, int) else size(w) for w in given[:1]) or 4
    return _lines(value, ()) + 4 * width * (1 + _line_ends(value))


def _sorted(value: Any, given: tuple[Any, ...]) -> int:
    _check_attribute(given)
    return weight(value) * (1 + _count(value).bit_length())


def _paired(value: Any, given: tuple[Any, ...]) -> int:
    """Whoever writes the values can choose them to fall on one place of a hash table, each compared with
    every other.
    """
    _check_attribute(given)
    return weight(value) + NODE // 2 * _count(value) ** 2


def _summed(value: Any, given: tuple[Any, ...]) -> int:
    _check_attribute(given)
    start = sum(size(s) for s in given if isinstance(s, (list, tuple)))
    return weight(value) + start * _count(value) + (weight(value) * _count(value) if start else 0)


def _lazy(value: Any, given: tuple[Any, ...]) -> int:
    _check_attribute(given)
    return size(value) if not isinstance(value, str) else NODE * len(value)


def _number(value: Any, _given: tuple[Any, ...]) -> int:
    if isinstance(value, str) and len(value) > _MAX_NUMBER_CHARS:
        raise SecurityError(
            f"the template reads a number from {len(value)} characters, where at most "
            f"{_MAX_NUMBER_CHARS} are allowed"
        )
    return NODE


def _rounded(_value: Any, given: tuple[Any, ...]) -> int:
    if any(isinstance(digits, int) and abs(digits) > _MAX_DIGITS for digits in given):
        raise SecurityError(f"the template rounds to more than {_MAX_DIGITS} digits")
    return NODE


def _escaped(value: Any, _given: tuple[Any, ...]) -> int:
    return 6 * text(value)


def _formatted(value: Any, given: tuple[Any, ...]) -> int:
    return percent(value, given) if isinstance(value, str) else text(value)


def _json(value: Any, given: tuple[Any, ...]) -> int:
    """With indents it is also counted piece by piece."""
    return (4 + weight(given) // NODE) * weight(value)


def _count(value: Any) -> int:
    return len(value) if isinstance(value, (str, _SIZED)) else 1


def _check_attribute(given: tuple[Any, ...]) -> None:
    """A path of attributes is followed for every value."""
    if any(len(path) > _MAX_NUMBER_CHARS for path in _texts(given)):
        raise SecurityError(f"the template uses a name of more than {_MAX_NUMBER_CHARS} characters")


_TEXT_METHODS: Final[dict[str, Cost]] = {
    **dict.fromkeys(("strip", "lstrip", "rstrip"), _stripped),
    **dict.fromkeys(("find", "index", "count", "partition"), _forward),
    **dict.fromkeys(("rfind", "rindex", "rpartition"), _backward),
    **dict.fromkeys(("startswith", "endswith", "removeprefix", "removesuffix"), _whole),
    **dict.fromkeys(("lower", "upper", "capitalize", "casefold", "swapcase", "title"), _recased),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    **dict.fromkeys(
        (
            "isalnum",
            "isalpha",
            "isascii",
            "isdecimal",
            "isdigit",
            "isidentifier",
            "islower",
            "isnumeric",
            "isprintable",
            "isspace",
            "istitle",
            "isupper",
        ),
        _whole,
    ),
    "split": _split,
    "rsplit": _split_backward,
    "splitlines": _lines,
    "replace": _replaced,
    "join": _joined,
    "format": _free,  # counted field by field
    "format_map": _free,
}
METHODS: Final[tuple[tuple[type, dict[str, Cost]], ...]] = (
    (str, _TEXT_METHODS),
    (list, {"index": _deep, "count": _deep, "copy": _copy}),
    (tuple, {"index": _deep, "count": _deep}),
    (dict, {"get": _arguments, "items": _free, "keys": _free, "values": _free, "copy": _copy}),
    (LoopContext, {"cycle": _free, "changed": _arguments}),
)
"""The methods that may be called, by the type that has them."""

TEXT_FILTERS: Final = frozenset({"lower", "upper", "capitalize", "title", "trim", "replace", "indent"})
"""Those that take any value as text."""

EAGER_FILTERS: Final = frozenset({"join", "sort", "min", "max", "unique", "sum", "dictsort", "list"})
"""Those that go through all of an iterator at once."""

FILTERS: Final[dict[str, Cost]] = {
    **dict.fromkeys(("length", "count", "first", "last", "default", "d", "abs", "attr", "items"), _free),
    **dict.fromkeys(("map", "select", "reject", "selectattr", "rejectattr"), _lazy),
    **dict.fromkeys(("lower", "upper", "capitalize"), _recased),
    **dict.fromkeys(("sort", "min", "max", "dictsort"), _sorted),
    **dict.fromkeys(("int", "float"), _number),
    **dict.fromkeys(("escape", "e"), _escaped),
    "title": _titled,
    "trim": _stripped,
    "replace": _replaced,
    "indent": _indented,
    "join": _joining,
    "list": _copy,
    "reverse": _copy,
    "string": _whole,
    "safe": _whole,
    "unique": _paired,
    "sum": _summed,
    "round": _rounded,
    "format": _formatted,
    "tojson": _json,
}
"""The filters that may be used."""

FREE_TESTS: Final = frozenset(
    {"defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number", "string"}
    | {"mapping", "sequence", "iterable", "callable", "sameas", "odd", "even", "divisibleby", "escaped"}
)
COMPARING_TESTS: Final[dict[str, str]] = {
    "in": "in",
    "==": "eq",
    "eq": "eq",
    "equalto": "eq",
    "!=": "ne",
    "ne": "ne",
    ">": "gt",
    "gt": "gt",
    "greaterthan": "gt",
    ">=": "gteq",
    "ge": "gteq",
    "<": "lt",
    "lt": "lt",
    "lessthan": "lt",
    "<=": "lteq",
    "le": "lteq",
}
"""Tests that compare, with the comparison's name."""


def dict_of(given: tuple[Any, ...]) -> int:
    """Return the cost of a dict made of arguments."""
    return sum(_paired(value, ()) for value in given)


def escaping(given: tuple[Any, ...]) -> int:
    """Return by how much an operation grows where a text that is marked as safe has the others escaped."""
    return 6 if any(isinstance(value, Markup) for value in given) else 1


def listed(value: Any) -> Any:
    """Return an iterator's values as a list, anything else as it is."""
    return list(value) if isinstance(value, Iterator) else value
