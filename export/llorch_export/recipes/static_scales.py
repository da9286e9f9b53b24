"""When a layer's input may have one scale for all tokens: what it is must be measured, or known."""

from __future__ import annotations

from pathlib import Path

from llorch_export.formats.module import NORM_READERS
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import UsageError


def refuse_unknown_scales(recipe: Recipe, calibration: Path | None) -> None:
    """Raise UsageError if a rule's static scale would be a guess.

    A scale is measured on the text ``calibration``, or known where a norm's output is rotated.
    Requires: rules are resolved.
    """
    if calibration is not None:
        return
    rotated = "rotate" in recipe.transforms
    for rule in recipe.rules:
        for module in rule.modules:
            if rule.activations == "static" and not (rotated and module.endswith(NORM_READERS)):
                raise UsageError(
                    f"activations static of {module}: how large its input gets is not known; add "
                    f"--calibration FILE to "
                    "measure it" + ("" if rotated else ", or choose activations row")
                )
