"""Settings of AWQ's packing, as AutoAWQ, transformers and auto-round write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llorch_export.config.fields import Fields
from llorch_export.config.packed.base import WAY_OUT, Packing, group_size, refuse_unasked
from llorch_export.config.packed.gptq import AUTO_ROUND_INERT

_BY_OUTPUT: Final = {"gemm": False, "exllama": False, "gemv": True}
"""By version: whether words lie along the inputs of an output, not along outputs."""

# How the codes were found, and which kernels were meant; which modules are packed is seen from the tensors.
_INERT: Final = (
    "quant_method",
    "method",
    "modules_to_not_convert",
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "exllama_config",
    "backend",
    "sym",
    "desc_act",
    "meta",
    "lm_head",
    "dynamic",
)


@dataclass(frozen=True, slots=True)
class AwqPacking(Packing):
    """AWQ: codes of 4 bits in words of 32.

    group: inputs that share a scale, or ``ONE_GROUP``. by_output: each output has words of its own, in which
        inputs follow each other; else each input has, in which outputs are interleaved.
    symmetric: every zero point is 8.
    """

    group: int
    by_output: bool
    symmetric: bool


def awq_packing(fields: Fields) -> AwqPacking:
    """Read the settings. Raises ArtifactError for what is not understood."""
    key = "w_bit" if "w_bit" in fields else "bits"
    if fields.integer(key, 4, low=1, high=32) != 4:
        raise fields.wrong(key, f"4, the only width of AWQ; {WAY_OUT}")
    version = fields.get("version") or fields.get("format") or fields.get("checkpoint_format") or "gemm"
    by_output = _BY_OUTPUT.get(version.lower()) if isinstance(version, str) else None
    if by_output is None:
        raise fields.wrong(
            "version" if "version" in fields else "format", f"one of {', '.join(_BY_OUTPUT)}; {WAY_OUT}"
        )
    for inert in ("format", "checkpoint_format", "pack_dtype"):
        fields.get(inert)
    if fields.get("dynamic"):
        raise fields.wrong("dynamic", f"nothing; {WAY_OUT}")
    packing = AwqPacking(
        notices=(),
        group=group_size(fields, "q_group_size" if "q_group_size" in fields else "group_size", 128),
        by_output=by_output,
        symmetric=not fields.boolean("zero_point", True),
    )
    refuse_unasked(fields, (*_INERT, *AUTO_ROUND_INERT))
    return packing
