"""Adapters on the oracle of ``llorch verify``: added by torch to the model that transformers loaded.

Which tensor is for which module, and with which scaling, is read as for the export. The arithmetic is written
here anew, from the definitions: what PEFT's layers compute, in float64, on whole weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from llorch_export.adapter.files import read_files
from llorch_export.adapter.modules import EMBEDDING_MODULE, HEAD_MODULE
from llorch_export.adapter.parts import FACTORS, Part, Parts, sort_parts
from llorch_export.adapter.settings import AdapterSettings, read_settings
from llorch_export.checkpoint.base import Adapter, Checkpoint
from llorch_export.checkpoint.stream import TensorRange, read_float32
from llorch_export.config.families import FUSED_MODULES

_REPLACING: Final = (Part.WEIGHT, Part.BIAS)


def merge_adapters(torch: Any, model: Any, checkpoint: Checkpoint) -> None:
    """Merge the checkpoint's adapters into ``model``, the base model as transformers has it."""
    base = checkpoint.base_config or checkpoint.config
    read = []
    for adapter in checkpoint.adapters:
        files = read_files(adapter.path)
        settings = read_settings(files.config, origin=files.origin, base=base)
        modules = dict(sort_parts(files.tensors).modules)
        if checkpoint.config.tie_word_embeddings and EMBEDDING_MODULE in modules:
            modules.pop(HEAD_MODULE, None)  # the same change, of the same table
        read.append((adapter, settings, modules))
    if base.tie_word_embeddings and not checkpoint.config.tie_word_embeddings:
        _untie(torch, model, [modules for _, _, modules in read])
    with torch.no_grad():
        for replaces in (True, False):  # what one adapter adds is added to what another puts in place
            for adapter, settings, modules in read:
                for name, parts in modules.items():
                    own = {part: value for part, value in parts.items() if (part in _REPLACING) is replaces}
                    if own:
                        _merge_module(torch, _Place(model, name), own, settings, adapter)


def _untie(torch: Any, model: Any, adapters: Sequence[Parts]) -> None:
    """Give the head a table of its own; first resize the shared one that factors of one side are for."""
    for modules in adapters:
        tables = [modules[name] for name in (EMBEDDING_MODULE, HEAD_MODULE) if name in modules]
        if len(tables) == 1 and Part.WEIGHT in tables[0] and not tables[0].keys().isdisjoint(FACTORS):
            model.lm_head.weight.data = torch.from_numpy(read_float32(tables[0][Part.WEIGHT]))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


class _Place:
    """A module of the model, or the rows of a fused one that an unfused name stands for."""

    def __init__(self, model: Any, name: str) -> None:
        self.name = name
        prefix, _, _ = name.partition(".self_attn." if ".self_attn." in name else ".mlp.")
        own = name.removeprefix(f"{prefix}.")
        modules = dict(model.named_modules(remove_duplicate=False))
        self.module: Any = modules.get(name)
        self.rows = slice(None)
        if self.module is None:
            fused, parts = next((f, p) for f, p in FUSED_MODULES.items() if own in p)
            self.module = modules[f"{prefix}.{fused}"]
            config = model.config
            head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            query, other = head * config.num_attention_heads, head * config.num_key_value_heads
            sizes = [query, other, other] if "self_attn" in fused else [config.intermediate_size] * 2
            start = sum(sizes[: parts.index(own)])
            self.rows = slice(start, start + sizes[parts.index(own)])


def _merge_module(
    torch: Any, place: _Place, parts: Mapping[Part, TensorRange], settings: AdapterSettings, adapter: Adapter
) -> None:
    module, rows = place.module, place.rows
    found = {part: torch.from_numpy(read_float32(source)).double() for part, source in parts.items()}
    if Part.WEIGHT in found:
        if rows == slice(None):
            module.weight.data = found[Part.WEIGHT].float()
        else:
            module.weight.data[rows] = found[Part.WEIGHT].float()
    if Part.BIAS in found:
        module.bias[rows] = found[Part.BIAS].float()
    scaling = settings.scaling_of(place.name) * adapter.weight
    weight = module.weight.data[rows].double()
    if Part.A in found:
        weight = weight + scaling * (found[Part.B] @ found[Part.A])
    if Part.EMBEDDING_A in found:
        weight = weight + scaling * (found[Part.EMBEDDING_B] @ found[Part.EMBEDDING_A]).T
    if Part.MAGNITUDE in found:
        axis = 0 if Part.EMBEDDING_A in found else 1
        factors = found[Part.MAGNITUDE] / torch.linalg.norm(weight, dim=axis)
        weight = weight * factors.unsqueeze(axis)
    if Part.TOKENS in found:
        ids = next(ids for name, ids in settings.tokens.items() if f".{place.name}".endswith(f".{name}"))
        weight[list(ids)] = found[Part.TOKENS]
    module.weight.data[rows] = weight.float()
    if Part.B_BIAS in found:
        if module.bias is None:
            module.bias = torch.nn.Parameter(torch.zeros(module.weight.shape[0]))
        module.bias[rows] += (scaling * found[Part.B_BIAS]).float()
