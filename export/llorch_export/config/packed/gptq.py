"""Settings of GPTQ's packing, as AutoGPTQ, GPTQModel, transformers and auto-round write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, cast

from llorch_export.config.fields import Fields
from llorch_export.config.packed.base import Packing, group_size, refuse_unasked

BITS: Final = (2, 3, 4, 8)

# How the codes were found, and which kernels of other runtimes were meant to run them.
_INERT: Final = (
    "quant_method",
    "damp_percent",
    "damp_auto_increment",
    "static_groups",
    "true_sequential",
    "model_name_or_path",
    "model_file_base_name",
    "dataset",
    "tokenizer",
    "batch_size",
    "block_name_to_quantize",
    "module_name_preceding_first_block",
    "model_seqlen",
    "pad_token_id",
    "use_cuda_fp16",
    "use_exllama",
    "max_input_length",
    "exllama_config",
    "disable_exllama",
    "cache_block_outputs",
    "backend",
    "is_marlin_format",
    "meta",
    "mse",
    "rotation",
    "parallel_packing",
    "lm_head",  # which modules are packed is seen from the tensors
    "modules_in_block_to_quantize",
    "hessian_chunk_size",
    "offload_to_disk",
    "offload_to_disk_path",
    "act_group_aware",
)


@dataclass(frozen=True, slots=True)
class GptqPacking(Packing):
    """GPTQ: codes in words of 32 bits along the inputs.

    group: inputs that share a scale, or ``ONE_GROUP``. symmetric: every zero point is ``2 ** (bits - 1)``.
    zero_offset: what stored zero points lack: 1 but in files of version 2.
    """

    bits: Literal[2, 3, 4, 8]
    group: int
    symmetric: bool
    zero_offset: Literal[0, 1]


def gptq_packing(fields: Fields) -> GptqPacking:
    """Read the settings. Raises ArtifactError for what is not understood."""
    bits = fields.integer("bits", low=2, high=8)
    if bits not in BITS:
        raise fields.wrong("bits", f"one of {', '.join(map(str, BITS))}")
    if fields.get("format") not in (None, "gptq", "gptq_v2"):
        raise fields.wrong("format", "'gptq' or 'gptq_v2'")
    layout = fields.get("checkpoint_format") or fields.get("format")
    if layout not in (None, "gptq", "gptq_v2"):
        raise fields.wrong("checkpoint_format", "'gptq' or 'gptq_v2'")
    if fields.get("pack_dtype") not in (None, "int32"):
        raise fields.wrong("pack_dtype", "'int32'")
    fields.get("desc_act")  # what order the inputs are in is seen from the tensors
    packing = GptqPacking(
        notices=(),
        bits=cast("Literal[2, 3, 4, 8]", bits),
        group=group_size(fields, "group_size", 128),
        symmetric=fields.boolean("sym", True),
        zero_offset=0 if layout == "gptq_v2" else 1,
    )
    refuse_unasked(fields, _INERT)
    return packing
