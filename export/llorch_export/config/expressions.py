"""Regular expressions of strangers, matched in bounded time.

PEFT matches names of modules with Python's ``re``, which a hostile expression keeps busy for years. Here an
expression becomes a nondeterministic automaton (Thompson 1968) of bounded size, and all of its states advance
together: the time is the number of states times the length of a name. What such an automaton cannot do
(looking ahead, references to groups) is reported as not supported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from llorch_export.config.notation import (
    Assertion,
    Choice,
    Node,
    One,
    Place,
    Repeat,
    Sequence,
    Test,
    UnsupportedExpressionError,
    parsed,
)

_MAX_STATES: Final = 2000


@dataclass(frozen=True, slots=True)
class _State:
    """A step over a character (``test``), a condition on the place (``holds``), or a fork.

    next: where it leads.
    """

    next: tuple[int, ...]
    test: Test | None = None
    holds: Assertion | None = None


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression; make one with :func:`compiled`."""

    _states: tuple[_State, ...]
    _start: int

    @property
    def size(self) -> int:
        """The number of states, which says how long a match may take."""
        return len(self._states)

    def matches(self, text: str) -> bool:
        """Tell whether the expression matches the whole of ``text``, as ``re.fullmatch`` does."""
        active = self._closure({self._start}, text, 0)
        for position, character in enumerate(text):
            reached = {
                target
                for number in active
                if (state := self._states[number]).test is not None and state.test(character)
                for target in state.next
            }
            if not reached:
                return False
            active = self._closure(reached, text, position + 1)
        return _ACCEPT in active

    def _closure(self, numbers: set[int], text: str, position: int) -> set[int]:
        """Return the states that are reached without a step over a character."""
        found, waiting = set(numbers), list(numbers)
        while waiting:
            state = self._states[waiting.pop()]
            if state.test is not None or (state.holds is not None and not state.holds(text, position)):
                continue
            for target in state.next:
                if target not in found:
                    found.add(target)
                    waiting.append(target)
        return found


_ACCEPT: Final = 0


def compiled(pattern: str) -> Expression:
    """Compile an expression in Python's notation.

    Raises UnsupportedExpressionError if it is malformed, too long, or needs more than an automaton.
    """
    node = parsed(pattern)
    builder = _Builder()
    start = builder.build(node, _ACCEPT)
    return Expression(tuple(builder.states), start)


@dataclass(slots=True)
class _Builder:
    """Makes states from the end of an expression to its beginning; each node is given where it leads."""

    states: list[_State] = field(default_factory=lambda: [_State(())])
    _work: int = 0

    def build(self, node: Node, then: int) -> int:
        """Return the first state of ``node``, which leads to the state ``then``."""
        self._work += 1  # repeats of nothing make no states, and yet take time
        if max(self._work, len(self.states)) > _MAX_STATES:
            raise UnsupportedExpressionError("it is too large")
        match node:
            case One(test):
                return self._add(_State((then,), test=test))
            case Place(holds):
                return self._add(_State((then,), holds=holds))
            case Sequence(parts):
                for part in reversed(parts):
                    then = self.build(part, then)
                return then
            case Choice(options):
                return self._add(_State(tuple(self.build(option, then) for option in options)))
            case Repeat(part, low, high):
                if high is None:
                    loop = self._add(_State(()))
                    self.states[loop] = _State((self.build(part, loop), then))
                    then = loop
                else:
                    for _ in range(high - low):
                        then = self._add(_State((self.build(part, then), then)))
                for _ in range(low):
                    then = self.build(part, then)
                return then

    def _add(self, state: _State) -> int:
        self.states.append(state)
        return len(self.states) - 1
