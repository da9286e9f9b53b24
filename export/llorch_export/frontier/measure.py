"""What each precision costs: divergence against bits per weight, for several recipes of one checkpoint.

Takes a checkpoint and makes an artifact for every recipe in turn, in a temporary folder; gives points for a
table and a picture. GGUF files of the same model, quantised elsewhere, may stand beside them: their weights
are widened to float32 and run by transformers, which flatters them, since an artifact also rounds its
activations.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx

from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.ggml_types import block_size
from llorch_export.checkpoint.gguf_header import GgufTensor
from llorch_export.checkpoint.gguf_parts import read_parts
from llorch_export.checkpoint.names import parameters
from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_export.recipes.base import base_recipe
from llorch_export.recipes.file import load_recipe
from llorch_export.source.open import open_checkpoint
from llorch_export.verify.reference import Reference
from llorch_serve.artifact.folder import Artifact
from llorch_serve.bench.workload import sample_text
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError
from llorch_serve.fidelity.divergence import DivergenceSum
from llorch_serve.runtime.opening import open_session
from llorch_serve.text.tokenizer import Tokenizer

MAX_TOKENS: Final = 2048
WINDOW: Final = 256
"""Tokens that one context holds, unless the model holds fewer; chunks of this size are also what prefill is
fastest in.
"""

OURS: Final = "llorch"
WIDENED: Final = "GGUF, weights in fp32"

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Point:
    """One recipe, measured.

    bits_per_weight: bytes of all weights, scales and zero points, times 8, over the parameters of the model.
    kl: mean of KL(fp32 reference || model) in nats; top1: share of equal likeliest tokens, 0..1.
    series: what made and ran it; points of one series share a marker in the picture.
    """

    label: str
    bits_per_weight: float
    kl: float
    top1: float
    series: str


def candidates(source: str) -> list[tuple[str, ExportOptions]]:
    """Return labels and options of the recipes worth comparing; outputs are placeholders."""
    base = ExportOptions(source=source, output=Path(), precision="int4")
    return [
        ("fp16", replace(base, precision="fp16")),
        ("int8", replace(base, precision="int8")),
        ("int8 row", replace(base, precision="int8", activations="row")),
        ("int8 b128", replace(base, precision="int8", block_size=128)),
        ("int4", base),
        ("int4 affine", replace(base, quantizer="affine")),
        ("int4 hqq", replace(base, quantizer="hqq")),
        ("int4 b32 nearest", replace(base, block_size=32, quantizer="nearest")),
        ("int4 b32 search", replace(base, block_size=32, quantizer="search")),
        ("int4 b16", replace(base, block_size=16)),
        ("int4 b32", replace(base, block_size=32)),
        ("int4 b64", replace(base, block_size=64)),
        ("int4 b128", replace(base, block_size=128)),
        ("int4 b32 head int4", replace(base, block_size=32, head_precision="int4")),
        ("int4 b64 head int4", replace(base, block_size=64, head_precision="int4")),
    ]


def recipe_candidates(
    source: str, recipes: Sequence[str], calibration: Path | None
) -> list[tuple[str, ExportOptions]]:
    """Return labels and options of recipes by name or file; ``calibration`` is for those that measure on a
    text.

    Raises UsageError if one cannot be used.
    """
    base, found = ExportOptions(source=source, output=Path()), []
    for name in recipes:
        recipe = load_recipe(name)
        options = recipe.options(replace(base, calibration=calibration if recipe.measures else None))
        base_recipe(options)  # so that one that cannot be used is refused before minutes are spent on others
        found.append((Path(name).name.removesuffix(".toml"), options))
    return found


def frontier(
    source: str,
    chosen: Sequence[tuple[str, ExportOptions]],
    peers: list[Path],
    text: str | None,
    step: Callable[[], None],
) -> list[Point]:
    """Measure the ``chosen`` recipes and the peers on ``text`` (None: the English sample that comes with
    llorch).

    step is called after each point.
    Raises ArtifactError if the source, a peer or the text cannot be used.
    """
    checkpoint = open_checkpoint(source, "none")  # divergence is of logits, whatever the model is for
    pieces = token_windows(checkpoint, sample_text() if text is None else text)
    reference = Reference(checkpoint)
    windows = [(piece, reference.logits(piece)) for piece in pieces]
    points = []
    for label, options in chosen:
        points.append(_artifact_point(label, options, checkpoint, windows))
        step()
    for path in peers:
        points.append(_peer_point(path, checkpoint, windows))
        step()
    return sorted(points, key=lambda point: point.bits_per_weight)


def _artifact_point(
    label: str, options: ExportOptions, checkpoint: Checkpoint, windows: list[tuple[list[int], Logits]]
) -> Point:
    with tempfile.TemporaryDirectory(prefix="llorch-frontier-") as folder:
        # Of weights alone: keys and values stay in what the graph computes in.
        kv_dtype = base_recipe(options).compute_type
        wanted = replace(options, output=Path(folder) / "artifact", kv_dtype=kv_dtype, embed="none")
        artifact = export(wanted, lambda phase, done, total: None).artifact
        session = open_session(
            artifact,
            SessionConfig(slots=1, max_context=max(2, *(len(piece) for piece, _ in windows))),
            lambda report: None,
        )
        figures = DivergenceSum()
        for piece, expected in windows:
            figures.add(expected, session.prefill(0, piece, 0, range(len(piece))))
        found = figures.result()
        bits = 8 * weight_bytes(artifact) / parameters(checkpoint.config)
    return Point(label, bits, found.kl, found.top1, OURS)


def _peer_point(path: Path, checkpoint: Checkpoint, windows: list[tuple[list[int], Logits]]) -> Point:
    peer = open_checkpoint(str(path), "none")
    if peer.config.vocab_size != checkpoint.config.vocab_size:
        raise ArtifactError(
            f"{path} has a vocabulary of {peer.config.vocab_size} tokens and {checkpoint.path} one of "
            f"{checkpoint.config.vocab_size}; compare files of the same model"
        )
    reference = Reference(peer)
    figures = DivergenceSum()
    for piece, expected in windows:
        figures.add(expected, reference.logits(piece))
    found = figures.result()
    return Point(path.name, gguf_bits_per_weight(path, checkpoint), found.kl, found.top1, WIDENED)


def gguf_bits_per_weight(path: Path, checkpoint: Checkpoint) -> float:
    """Return the stored bits of all tensors of a GGUF file over the parameters of the model it was made
    from.
    """
    bits = sum(_stored_bits(tensor) for tensor in read_parts(path).tensors.values())
    return bits / parameters(checkpoint.config)


def _stored_bits(tensor: GgufTensor) -> float:
    elements, size = block_size(tensor.type_id)
    return 8 * size / elements * math.prod(tensor.shape)


def weight_bytes(artifact: Artifact) -> int:
    """Return the bytes of an artifact's weights, each region of the data file once; rotary tables are not
    weights.
    """
    regions: dict[int, int] = {}
    for tensor in onnx.load(artifact.graph_path, load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place and not tensor.name.startswith("rotary."):
            regions[int(place["offset"])] = int(place["length"])
    return sum(regions.values())


def token_windows(checkpoint: Checkpoint, text: str) -> list[list[int]]:
    """Return the first tokens of ``text`` in pieces of one context each. Raises ArtifactError if the model
    knows none.
    """
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer.tokenizer_json, origin=str(checkpoint.path))
    ids = [
        id_
        for id_ in tokenizer.encode(text, add_special_tokens=False)[:MAX_TOKENS]
        if id_ < checkpoint.config.vocab_size
    ]
    if not ids:
        raise ArtifactError(f"the text gives no token that {checkpoint.path} knows; choose another --text")
    window = min(WINDOW, checkpoint.config.max_position_embeddings)
    return [ids[start : start + window] for start in range(0, len(ids), window)]
