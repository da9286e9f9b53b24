"""Limits that a figure must keep: ``--at-least arc_easy.acc=0.6``, ``--at-most perplexity=25``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llorch_serve.errors import UsageError
from llorch_serve.evaluation.schema import Evaluation, figures


@dataclass(frozen=True, slots=True)
class Gate:
    """name: of a figure. least: whether ``limit`` is the least value that passes, or the greatest."""

    name: str
    limit: float
    least: bool

    @property
    def flag(self) -> str:
        """How the gate is asked for."""
        return f"{'--at-least' if self.least else '--at-most'} {self.name}={self.limit:g}"

    def passes(self, value: float | None) -> bool:
        """Tell whether a figure keeps the limit. One that is no number keeps none."""
        if value is None or math.isnan(value):
            return False
        return value >= self.limit if self.least else value <= self.limit


def read_gates(at_least: Sequence[str], at_most: Sequence[str]) -> tuple[Gate, ...]:
    """Return the gates that flags ask for. Raises UsageError."""
    given = [("--at-least", one, True) for one in at_least] + [("--at-most", one, False) for one in at_most]
    return tuple(_read(flag, text, least=least) for flag, text, least in given)


def _read(flag: str, text: str, *, least: bool) -> Gate:
    name, equals, number = text.rpartition("=")
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not equals or not name or not math.isfinite(limit):
        raise UsageError(
            f"{flag} is {text!r}; expected FIGURE=NUMBER, like arc_easy.acc=0.6 or perplexity=25"
        )
    return Gate(name, limit, least)


def check_asked(gates: Sequence[Gate], *, texts: bool, reference: bool, tasks: Sequence[str]) -> None:
    """Raise UsageError for a gate of what is not measured at all, before minutes are spent."""
    for gate in gates:
        match gate.name:
            case "perplexity" | "word_perplexity" | "byte_perplexity" | "bits_per_byte":
                missing = None if texts else "no text is read; add --text FILE"
            case "kl" | "top1":
                missing = None if reference else "nothing is compared; add --reference FILE"
            case _ if "." not in gate.name:
                missing = (
                    "there is no such figure; expected TASK.METRIC, perplexity, word_perplexity, "
                    "byte_perplexity, bits_per_byte, kl or top1"
                )
            case _:
                missing = None if tasks else "no task is run; add --tasks TASK"
        if missing is not None:
            raise UsageError(f"{gate.flag}: {missing}")


def missed(gates: Sequence[Gate], evaluation: Evaluation) -> list[str]:
    """Return a line for each gate that is missed.

    Raises UsageError for one of a figure that the evaluation lacks.
    """
    found = dict(figures(evaluation))
    lines = []
    for gate in gates:
        if gate.name not in found:
            known = ", ".join(sorted(found)) or "none"
            raise UsageError(f"{gate.flag}: there is no such figure; found {known[:2000]}")
        value = found[gate.name]
        if not gate.passes(value):
            shown = "no number" if value is None else f"{value:.6g}"
            lines.append(f"{gate.name} is {shown}, missed {gate.flag}")
    return lines
