"""Settings of GPTQ's packing, as AutoGPTQ, GPTQModel, transformers and auto-round write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast

from llorch_export.config.expressions import Expression
from llorch_export.config.fields import Fields, shown
from llorch_export.config.packed.base import MAX_PATTERNS, WAY_OUT, Packing, group_size, refuse_unasked
from llorch_export.config.packed.patterns import Expressions
from llorch_serve.errors import ArtifactError

BITS: Final = (2, 3, 4, 8)

# How the codes were found, and which kernels of other runtimes were meant to run them. Which modules are
# packed is seen from the tensors, and so is the order of their inputs.
INERT: Final = (
    "quant_method",
    "method",
    "desc_act",
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
    "parallel_packing",
    "lm_head",
    "modules_in_block_to_quantize",
    "hessian_chunk_size",
    "offload_to_disk",
    "offload_to_disk_path",
    "act_group_aware",
)
_GPTQMODEL_INERT: Final = ("hessian", "vram_strategy", "gc_mode", "wait_for_submodule_finalizers")
# What auto-round adds about how it found the codes.
AUTO_ROUND_INERT: Final = (
    "autoround_version",
    "provider",
    "data_type",
    "enable_quanted_input",
    "enable_minmax_tuning",
    "low_gpu_mem_usage",
    "nsamples",
    "seqlen",
    "iters",
    "lr",
    "minmax_lr",
    "gradient_accumulate_steps",
    "amp",
    "scale_dtype",
    "to_quant_block_names",
    "quant_block_list",
    "super_bits",
    "super_group_size",
)


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """How one module is packed.

    group: inputs that share a scale, or ``ONE_GROUP``. symmetric: every zero point is ``2 ** (bits - 1)``.
    """

    bits: Literal[2, 3, 4, 8]
    group: int
    symmetric: bool


Rules = tuple[tuple[Expression | str, GptqScheme | None], ...]


@dataclass(frozen=True, slots=True)
class GptqPacking(Packing):
    """GPTQ: codes in words of 32 bits along the inputs.

    scheme: of modules that no rule names. zero_offset: what stored zero points lack: 1 but in files of
        version 2. carries: whether it was added to whole words, so that it carries over between zero points.
    rules: names, or expressions over the start of a module's name, of which the first that matches holds;
        None: such modules are not packed.
    """

    scheme: GptqScheme
    zero_offset: Literal[0, 1]
    carries: bool = True
    rules: Rules = ()

    def of(self, module: str) -> GptqScheme | None:
        """Return how a module is packed, or None if it is not."""
        for rule, scheme in self.rules:
            if rule == module if isinstance(rule, str) else rule.matches(module):
                return scheme
        return self.scheme


def gptq_packing(fields: Fields) -> GptqPacking:
    """Read the settings. Raises ArtifactError for what is not understood."""
    if fields.get("format") not in (None, "gptq", "gptq_v2"):
        raise fields.wrong("format", "'gptq' or 'gptq_v2'")
    layout = fields.get("checkpoint_format") or fields.get("format")
    if layout not in (None, "gptq", "gptq_v2"):
        raise fields.wrong("checkpoint_format", "'gptq' or 'gptq_v2'")
    if fields.get("pack_dtype") not in (None, "int32"):
        raise fields.wrong("pack_dtype", "'int32'")
    if fields.get("method") not in (None, "gptq"):
        raise fields.wrong("method", "'gptq', as quant_method says")
    for key in ("rotation", "adapter", "pre_filters", "preprocessors"):
        if fields.get(key):
            raise fields.wrong(key, f"nothing, since it changes what the model computes; {WAY_OUT}")
    scheme = gptq_scheme(fields)
    packing = GptqPacking(
        notices=(),
        scheme=scheme,
        zero_offset=0 if layout == "gptq_v2" else 1,
        rules=_rules(fields, scheme),
    )
    if packing.zero_offset and any(_ambiguous(one) for one in (scheme, *(s for _, s in packing.rules))):
        raise ArtifactError(
            f"{fields.origin} has zero points of 3 bits in checkpoint_format gptq, which the tools that "
            f"write it store differently; save the model with checkpoint_format gptq_v2, or {WAY_OUT}"
        )
    refuse_unasked(fields, (*INERT, *_GPTQMODEL_INERT, *AUTO_ROUND_INERT))
    return packing


def gptq_scheme(fields: Fields, default: GptqScheme | None = None) -> GptqScheme:
    """Read how modules are packed; ``default``: where a setting is absent. Raises ArtifactError."""
    bits = fields.integer("bits", None if default is None else default.bits, low=2, high=8)
    if bits not in BITS:
        raise fields.wrong("bits", f"one of {', '.join(map(str, BITS))}")
    return GptqScheme(
        bits=cast("Literal[2, 3, 4, 8]", bits),
        group=group_size(fields, "group_size", 128 if default is None else default.group),
        symmetric=fields.boolean("sym", True if default is None else default.symmetric),
    )


def _ambiguous(scheme: GptqScheme | None) -> bool:
    return scheme is not None and scheme.bits == 3 and not scheme.symmetric


def _rules(fields: Fields, default: GptqScheme) -> Rules:
    """Read ``dynamic``: GPTQModel's settings for some modules, with ``-:`` before those that stay plain."""
    rules = fields.mapping("dynamic")
    if len(rules) > MAX_PATTERNS:
        raise fields.wrong("dynamic", f"at most {MAX_PATTERNS} rules")
    found: list[tuple[Expression | str, GptqScheme | None]] = []
    origin = f"{fields.origin}: dynamic"
    expressions = Expressions(origin)
    for pattern, settings in rules.items():
        expression = expressions.start(pattern.removeprefix("+:").removeprefix("-:"))
        if pattern.startswith("-:"):
            found.append((expression, None))
            continue
        if not isinstance(settings, Mapping):
            raise ArtifactError(f"{origin}: {shown(pattern)} has no object of settings; {WAY_OUT}")
        own = Fields(settings, origin=f"{origin}: {shown(pattern)}")
        found.append((expression, gptq_scheme(own, default)))
        refuse_unasked(own, INERT)
    return tuple(found)
