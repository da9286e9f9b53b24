"""The notation of regular expressions, as Python's ``re`` has it, read into a small tree.

Takes an expression of a stranger; gives nodes that :mod:`.expressions` makes an automaton of. What an
automaton cannot do (looking ahead, references to groups) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_MAX_LENGTH: Final = 2000
_MAX_DEPTH: Final = 20
_MAX_REPEAT: Final = 1000

Test = Callable[[str], bool]
Assertion = Callable[[str, int], bool]


class UnsupportedExpressionError(ValueError):
    """An expression that cannot be matched here; the message says why."""


@dataclass(frozen=True, slots=True)
class One:
    """A character that passes ``test``."""

    test: Test


@dataclass(frozen=True, slots=True)
class Place:
    """A condition on the place between two characters."""

    holds: Assertion


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of them."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """``low`` to ``high`` times; high None: without end."""

    part: Node
    low: int
    high: int | None


Node = One | Place | Sequence | Choice | Repeat


def parsed(pattern: str) -> Node:
    """Return the tree of an expression.

    Raises UnsupportedExpressionError if it is malformed, too long, or needs more than an automaton.
    """
    if len(pattern) > _MAX_LENGTH:
        raise UnsupportedExpressionError(f"it has {len(pattern)} characters, at most {_MAX_LENGTH} are read")
    parser = _Parser(pattern)
    node = parser.alternatives(0)
    if not parser.at_end:
        raise UnsupportedExpressionError("its parentheses are unbalanced")
    return node


def _is_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def _at_boundary(text: str, position: int) -> bool:
    before = position > 0 and _is_word(text[position - 1])
    after = position < len(text) and _is_word(text[position])
    return before is not after


_CLASSES: Final[dict[str, Test]] = {
    "d": str.isdecimal,
    "w": _is_word,
    "s": str.isspace,
    "D": lambda c: not c.isdecimal(),
    "W": lambda c: not _is_word(c),
    "S": lambda c: not c.isspace(),
}
_PLACES: Final[dict[str, Assertion]] = {
    "b": _at_boundary,
    "B": lambda text, position: not _at_boundary(text, position),
    "A": lambda text, position: position == 0,
    "Z": lambda text, position: position == len(text),
}
_CONTROLS: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


class _Parser:
    """Reads an expression from left to right; one method for each level of the notation."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0

    @property
    def at_end(self) -> bool:
        return self._position == len(self._pattern)

    def alternatives(self, depth: int) -> Node:
        """Read up to a closing parenthesis or the end."""
        if depth > _MAX_DEPTH:
            raise UnsupportedExpressionError("its parentheses are nested too deeply")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while not self.at_end and self._pattern[self._position] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return Sequence(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        for mark, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._take(mark):
                repeat = Repeat(part, low, high)
                break
        else:
            bounds = self._bounds()
            if bounds is None:
                return part
            repeat = Repeat(part, *bounds)
        if isinstance(part, Place):
            raise UnsupportedExpressionError("it repeats nothing")
        self._take("?")  # the lazy form matches the same names
        if not self.at_end and self._pattern[self._position] in "*+?":
            raise UnsupportedExpressionError("it repeats a repetition")
        return repeat

    def _bounds(self) -> tuple[int, int | None] | None:
        """Read ``{2}``, ``{2,}``, ``{,3}`` or ``{2,3}``; anything else in braces stands for itself."""
        end = self._pattern.find("}", self._position)
        if self.at_end or self._pattern[self._position] != "{" or end < 0:
            return None
        low, comma, high = self._pattern[self._position + 1 : end].partition(",")
        numbers = [text for text in (low, high) if text]
        if not numbers or not all(text.isascii() and text.isdigit() and len(text) < 5 for text in numbers):
            return None
        least = int(low or 0)
        most = least if not comma else int(high) if high else None
        if max(least, most or 0) > _MAX_REPEAT or (most is not None and most < least):
            raise UnsupportedExpressionError("it repeats too often")
        self._position = end + 1
        return least, most

    def _atom(self, depth: int) -> Node:
        character = self._next()
        if character == "(":
            return self._group(depth)
        if character == "[":
            return One(self._set())
        if character == ".":
            return One(lambda c: c != "\n")
        if character == "^":
            return Place(_PLACES["A"])
        if character == "$":
            return Place(_PLACES["Z"])
        if character == "\\":
            return self._escape()
        if character in "*+?":
            raise UnsupportedExpressionError("it repeats nothing")
        return One(character.__eq__)

    def _group(self, depth: int) -> Node:
        if self._take("?") and not self._take(":"):
            name, end, _ = self._pattern[self._position :].partition(">")
            if not name.startswith("P<") or not end or not name[2:].isidentifier():
                raise UnsupportedExpressionError("it looks ahead or behind, or sets flags")
            self._position += len(name) + 1
        node = self.alternatives(depth + 1)
        if not self._take(")"):
            raise UnsupportedExpressionError("its parentheses are unbalanced")
        return node

    def _escape(self) -> Node:
        character = self._next()
        if character in _CLASSES:
            return One(_CLASSES[character])
        if character in _PLACES:
            return Place(_PLACES[character])
        return One(self._literal(character).__eq__)

    def _literal(self, character: str) -> str:
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character.isalnum():
            raise UnsupportedExpressionError(f"it holds \\{character}")
        return character

    def _set(self) -> Test:
        negated = self._take("^")
        tests: list[Test] = []
        first = True
        while first or not self._take("]"):
            first = False
            low = self._next()
            if low == "\\":
                low = self._next()
                if low in _CLASSES:
                    tests.append(_CLASSES[low])
                    continue
                low = self._literal(low)
            tests.append(self._span(low))
        return lambda c: any(test(c) for test in tests) is not negated

    def _span(self, low: str) -> Test:
        """Read the rest of ``a-z``, or nothing."""
        following = self._pattern[self._position : self._position + 2]
        if len(following) < 2 or following[0] != "-" or following[1] in "]\\":
            return low.__eq__
        self._position += 2
        high = following[1]
        return lambda c: low <= c <= high

    def _next(self) -> str:
        if self.at_end:
            raise UnsupportedExpressionError("it ends too early")
        self._position += 1
        return self._pattern[self._position - 1]

    def _take(self, character: str) -> bool:
        if self._pattern.startswith(character, self._position):
            self._position += 1
            return True
        return False
