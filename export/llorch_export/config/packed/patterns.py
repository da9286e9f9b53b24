"""Which modules a packed checkpoint's settings mean: by name, or by expressions over the start of a name.

The tools match with Python's ``re.match``; expressions of strangers are matched in bounded time here
(:mod:`llorch_export.config.expressions`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from llorch_export.config.expressions import Expression, compiled
from llorch_export.config.fields import shown
from llorch_export.config.notation import UnsupportedExpressionError
from llorch_export.config.packed.base import WAY_OUT
from llorch_serve.errors import ArtifactError

EXPRESSION: Final = "re:"
"""What goes before an expression, in formats that have names beside them."""

_MAX_STATES: Final = 8000  # of all expressions of a file: each name is tried against each of them


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Modules by their names, or by expressions that match the start of them."""

    names: frozenset[str] = frozenset()
    expressions: tuple[Expression, ...] = ()

    def have(self, module: str) -> bool:
        """Tell whether a module is one of them."""
        return module in self.names or any(one.matches(module) for one in self.expressions)


class Expressions:
    """Compiles the expressions of one file, which together take a bounded time. ``origin`` names the file in
    errors.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._states = 0

    def start(self, text: str) -> Expression:
        """Compile an expression that is to match the start of a name.

        Raises ArtifactError if it cannot be matched here, or if all of them are too many.
        """
        try:
            compiled(text)  # by itself: what follows must not close a bracket of it
            found = compiled(f"(?:{text}).*")
        except UnsupportedExpressionError as error:
            raise ArtifactError(
                f"{self._origin} has the expression {shown(text)!r}, which cannot be matched: {error}; "
                f"{WAY_OUT}"
            ) from error
        self._states += found.size
        if self._states > _MAX_STATES:
            raise ArtifactError(
                f"{self._origin} has expressions that take more than {_MAX_STATES} steps together to match a "
                "name; list the names of modules instead"
            )
        return found

    def patterns(self, texts: Collection[str]) -> ModulePatterns:
        """Read names, and expressions that begin with ``re:``. Raises as :meth:`start` does."""
        names = frozenset(text for text in texts if not text.startswith(EXPRESSION))
        found = (text.removeprefix(EXPRESSION) for text in texts if text.startswith(EXPRESSION))
        return ModulePatterns(names, tuple(self.start(text) for text in found))
