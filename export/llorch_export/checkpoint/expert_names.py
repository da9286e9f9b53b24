"""The tensors of layers with experts: which there are, and where a checkpoint keeps each of them.

Input is a :class:`LlamaConfig` and the names that a file uses; output are the modules of a layer, one for
each matrix of each expert, and the rows of a stored tensor that each of them is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from llorch_export.config.experts import EXPERT, ExpertNames
from llorch_export.config.families import FAMILIES
from llorch_serve.artifact.manifest import ExpertsConfig, LlamaConfig

ROUTER: Final = "mlp.gate"
EXPERTS: Final = "mlp.experts."
SHARED: Final = "mlp.shared_expert"
SHARED_GATE: Final = "mlp.shared_expert_gate"
_OTHER_BLOCK: Final = "block_sparse_moe"
_OTHER_ROUTER: Final = "mlp.router"
PARTS: Final = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Where a checkpoint keeps a tensor: rows ``start`` to ``stop`` of the tensor ``name``; stop None: all of
    it.

    stack: the tensor is so many matrices, whose rows are counted through; None: it is one.
    step: every ``step``-th of these rows. turned: its matrices are stored as [columns, rows].
    """

    name: str
    start: int = 0
    stop: int | None = None
    stack: int | None = None
    step: int = 1
    turned: bool = False


def own_name(module: str) -> str:
    """Return the name of a module of transformers' code as it is here; some families call blocks of experts
    otherwise.
    """
    return module.replace(f".{_OTHER_BLOCK}", ".mlp").replace(f".{_OTHER_ROUTER}", f".{ROUTER}")


def expert_module(expert: int, part: str) -> str:
    """Return the name of one of an expert's ``PARTS`` in its layer."""
    return f"{EXPERTS}{expert}.{part}"


def expert_shapes(config: LlamaConfig) -> dict[str, tuple[int, int]]:
    """Return the modules of a layer with experts and their shapes [out, in]: router, experts, shared
    block.
    """
    experts, hidden = config.experts, config.hidden_size
    if not isinstance(experts, ExpertsConfig):
        return {}
    shapes = {ROUTER: (experts.count, hidden)}
    for expert in range(experts.count):
        for part, shape in _parts(experts.intermediate_size, hidden):
            shapes[expert_module(expert, part)] = shape
    if experts.shared_intermediate_size is not None:
        for part, shape in _parts(experts.shared_intermediate_size, hidden):
            shapes[f"{SHARED}.{part}"] = shape
        shapes[SHARED_GATE] = (1, hidden)
    return shapes


def feed_forward_blocks(config: LlamaConfig, layer: int) -> tuple[str, ...]:
    """Return the blocks of ``PARTS`` that a layer has: one, or its experts and the shared one."""
    experts = config.layer_experts(layer)
    if experts is None:
        return ("mlp",)
    shared = () if experts.shared_intermediate_size is None else (SHARED,)
    return (*(f"mlp.experts.{expert}" for expert in range(experts.count)), *shared)


def _parts(inner: int, hidden: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield from zip(PARTS, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True)


def names_in_use(config: LlamaConfig, found: Iterable[str]) -> ExpertNames | None:
    """Return how a file with tensors of these names keeps its experts; None if the model has none.

    Of a file that has none of them the family's first way is taken, so that they are reported missing.
    """
    family = FAMILIES[config.architecture]
    if family.experts is None or not isinstance(config.experts, ExpertsConfig):
        return None
    found = list(found)
    first = next(i for i in range(config.num_hidden_layers) if config.layer_experts(i) is not None)
    used = (names for names in family.experts.names if names.is_used(found, first))
    return next(used, family.experts.names[0])


def expert_places(config: LlamaConfig, names: ExpertNames) -> dict[str, StoredRows]:
    """Return where a checkpoint that uses ``names`` keeps the router and the experts of every layer."""
    places: dict[str, StoredRows] = {}
    for layer in range(config.num_hidden_layers):
        experts = config.layer_experts(layer)
        if experts is None:
            continue
        prefix = f"model.layers.{layer}."
        places[f"{prefix}{ROUTER}.weight"] = StoredRows(f"{prefix}{names.router}")
        if experts.biases:
            places[f"{prefix}{ROUTER}.bias"] = StoredRows(f"{prefix}{_bias_name(names.router)}")
        for part, (rows, _) in _parts(experts.intermediate_size, config.hidden_size):
            for expert in range(experts.count):
                module = f"{prefix}{expert_module(expert, part)}"
                place = _place(prefix, names, part, rows, expert, experts.count)
                places[f"{module}.weight"] = place
                if experts.biases:
                    places[f"{module}.bias"] = replace(place, name=_bias_name(place.name), turned=False)
    return places


def _place(prefix: str, names: ExpertNames, part: str, rows: int, expert: int, count: int) -> StoredRows:
    """Return where one of an expert's ``PARTS`` lies, which has so many rows."""
    stored = dict(zip(PARTS, (names.gate, names.up, names.down), strict=True))
    name = f"{prefix}{stored[part]}"
    if EXPERT in name:
        return StoredRows(name.replace(EXPERT, str(expert)))
    if part == "down_proj" or not names.together:
        return StoredRows(name, expert * rows, (expert + 1) * rows, count, turned=names.turned)
    second, start = part == "up_proj", expert * 2 * rows
    if names.by_turns:
        first, last = start + second, start + 2 * rows - 1 + second
        return StoredRows(name, first, last, count, 2, names.turned)
    first = start + rows * second
    return StoredRows(name, first, first + rows, count, turned=names.turned)


def _bias_name(weight: str) -> str:
    """Return what the bias beside a weight is called."""
    if weight.endswith(".weight"):
        return f"{weight.removesuffix('.weight')}.bias"
    return f"{weight}_bias"
