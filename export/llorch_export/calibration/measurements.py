"""What a calibration text is, and what is measured on it.

Input is the file that ``--calibration`` names, and the checkpoint's tokenizer; output are token ids with the
hash that the manifest keeps. The measuring itself is in :mod:`.calibrate`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.base import Checkpoint
from llorch_export.formats.module import uses_static
from llorch_serve.artifact.manifest import CalibrationText, Recipe, TransformName
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.text.tokenizer import Tokenizer

BUNDLED_TEXT: Final = Path(__file__).parent / "calibration.txt"
"""Prose, code, tables and a few languages, about a thousand tokens."""

MAX_TOKENS: Final = 8192
"""Tokens of the text that are run, from its beginning; maxima of channels hardly move after a few
thousand.
"""

_MAX_BYTES: Final = 2**24
_BYTES_A_TOKEN: Final = (
    16  # far more than text has, so that tokenising stops soon after the tokens that are used
)


@dataclass(frozen=True, slots=True)
class CalibrationIds:
    """A text as token ids, and its entry for the manifest."""

    ids: tuple[int, ...]
    text: CalibrationText


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """What went into one linear layer: for each input channel the mean of the squares, and the largest
    magnitude.
    """

    mean_square: npt.NDArray[np.float64]
    absmax: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Statistics of one run over a text in fp32.

    inputs: by the name of the linear layer's weight (``model.layers.0.mlp.down_proj.weight``); layers that
        read the same input share an entry. The head's is ``lm_head.weight``, or ``model.embed_tokens.weight``
        where it is tied.
    key_norm: [layers, kv heads, head_dim], for each element of a key the largest norm of its rotary pair,
        which both elements of a pair have; of an element that is not rotated, its largest magnitude. Rotation
        leaves it as it is.
    value_absmax: [layers, kv heads], the largest magnitude of values.
    """

    inputs: Mapping[str, ChannelStatistics]
    key_norm: npt.NDArray[np.float32]
    value_absmax: npt.NDArray[np.float32]

    def peaks(self) -> dict[str, float]:
        """Return by module how far its largest input is above the root mean square of all its inputs."""
        return {
            name.removesuffix(".weight"): float(
                seen.absmax.max() / max(seen.mean_square.mean() ** 0.5, 1e-30)
            )
            for name, seen in self.inputs.items()
        }


def read_calibration(path: Path, checkpoint: Checkpoint) -> CalibrationIds:
    """Read a UTF-8 text and tokenise its beginning with the checkpoint's tokenizer.

    Raises ArtifactError if it cannot be read, is too long, is no text or has fewer than two tokens of the
    vocabulary.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ArtifactError(
            f"--calibration {path} cannot be read: {error.strerror or error}; expected a text file"
        ) from error
    if len(data) > _MAX_BYTES:
        raise ArtifactError(
            f"--calibration {path} has more than {_MAX_BYTES >> 20} MiB, and {MAX_TOKENS} tokens are used; "
            f"cut it"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArtifactError(
            f"--calibration {path} is not UTF-8 text (byte {error.start}); expected plain text"
        ) from error
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer.tokenizer_json, origin=str(checkpoint.path))
    found = tokenizer.encode(text[: MAX_TOKENS * _BYTES_A_TOKEN], add_special_tokens=True)
    ids = tuple(id_ for id_ in found if id_ < checkpoint.config.vocab_size)[:MAX_TOKENS]
    if len(ids) < 2:
        raise ArtifactError(
            f"--calibration {path} gives {len(ids)} tokens; expected a text like those the model will see, "
            "a few pages long"
        )
    return CalibrationIds(ids, CalibrationText(sha256=hashlib.sha256(data).hexdigest(), tokens=len(ids)))


def require_use(recipe: Recipe, path: Path | None, *, may_measure: bool = False) -> None:
    """Raise UsageError if a calibration text is given and nothing in the recipe uses one, or the reverse.

    may_measure: something would use a text and can do without.
    """
    users = calibrated_parts(recipe)
    if path is not None and not users and not may_measure and not recipe.int8_cache:
        raise UsageError(
            f"--calibration {path} has no effect on this export: nothing in its recipe is measured on a "
            f"text; leave it out"
        )
    if path is None and users:
        raise UsageError(
            f"{' and '.join(users)} need figures measured on a text; add --calibration FILE with a few "
            f"pages of text"
        )


def calibrated_parts(recipe: Recipe) -> tuple[str, ...]:
    """Return what in a recipe is measured on a text, as its flags say it."""
    return (*measured_transforms(recipe), *measured_weights(recipe), *measured_moments(recipe))


def measured_transforms(recipe: Recipe) -> tuple[str, ...]:
    """Return the transforms whose scales are measured, on the checkpoint's own weights."""
    return tuple(f"--transform {name}" for name in recipe.transforms if measures((name,)))


def measures(transforms: Iterable[TransformName]) -> bool:
    """Tell whether one of the transforms takes its scales from a text."""
    return any(name in ("equalise", "smooth") for name in transforms)


def measured_moments(recipe: Recipe) -> tuple[str, ...]:
    """Return what asks for the second moments of the weights' inputs, on the weights that transforms have
    left.
    """
    defaults = {recipe.precision, recipe.head_precision}
    quantizers = {rule.quantizer for rule in recipe.rules} | (
        {recipe.quantizer} if defaults & {"int4", "int8"} else set()
    )
    return ("--quantizer gptq",) if "gptq" in quantizers else ()


def measured_weights(recipe: Recipe) -> tuple[str, ...]:
    """Return what the graph itself measures, on the weights that transforms have left."""
    if recipe.calibration is not None and uses_static(recipe):  # without a text, rotation settles the scales
        return ("--activations static",)
    return ()
