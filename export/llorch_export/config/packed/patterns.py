"""Which modules a packed checkpoint's settings mean: by name, or by expressions over the start of a name.

The tools match with Python's ``re.match``; expressions of strangers are matched in bounded time here
(:mod:`llorch_export.config.expressions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from llorch_export.config.expressions import Expression, compiled
from llorch_export.config.fields import shown
from llorch_export.config.notation import UnsupportedExpressionError
from llorch_export.config.packed.base import WAY_OUT
from llorch_serve.errors import ArtifactError

EXPRESSION: Final = "re:"
"""What goes before an expression, in formats that have names beside them."""

_MAX_STATES: Final = 8000  # of all expressions of a list: a name is tried against each


@dataclass(frozen=True, slots=True)
class ModulePatterns:
    """Modules by their names, or by expressions that match the start of them."""

    names: frozenset[str] = frozenset()
    expressions: tuple[Expression, ...] = ()

    def have(self, module: str) -> bool:
        """Tell whether a module is one of them."""
        return module in self.names or any(one.matches(module) for one in self.expressions)


def module_patterns(texts: Iterable[str], origin: str) -> ModulePatterns:
    """Read names, and expressions that begin with ``re:``. ``origin`` says where they stand, in errors.

    Raises ArtifactError if an expression cannot be matched here.
    """
    found, names, states = [], set(), 0
    for text in texts:
        if not text.startswith(EXPRESSION):
            names.add(text)
            continue
        found.append(start_expression(text.removeprefix(EXPRESSION), origin))
        states += found[-1].size
        if states > _MAX_STATES:
            raise ArtifactError(
                f"{origin} has expressions that take more than {_MAX_STATES} steps together to match a name; "
                "list the names of modules instead"
            )
    return ModulePatterns(frozenset(names), tuple(found))


def start_expression(text: str, origin: str) -> Expression:
    """Compile an expression that is to match the start of a name. Raises as :func:`module_patterns` does."""
    try:
        compiled(text)  # by itself: what follows must not close a bracket of it
        return compiled(f"(?:{text}).*")
    except UnsupportedExpressionError as error:
        raise ArtifactError(
            f"{origin} has the expression {shown(text)!r}, which cannot be matched: {error}; {WAY_OUT}"
        ) from error
