"""LoRA adapters (Hu et al. 2021) in PEFT's format, merged into a checkpoint's weights as they are read.

Input is an untrusted folder with ``adapter_config.json`` and ``adapter_model.safetensors``; output are lazy
tensors ``W + scaling * B A``, the sum taken in float64 and rounded to float32 once. Whatever an adapter can
hold beyond that (saved modules, biases, magnitudes, other initialisations that change W) is refused by name.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.base import Adapter, Checkpoint, LazyTensor
from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.checkpoint.safetensors import file_tensors
from llorch_export.checkpoint.stream import TensorRange, read_float32, read_rows, require_finite
from llorch_export.config.fields import Fields
from llorch_serve.errors import ArtifactError

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"

_MERGE_FIRST: Final = "merge it with PEFT (merge_and_unload, save_pretrained) and export the result"
_KEY: Final = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<side>[AB])\.weight")
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
_MAX_RANK: Final = 2**10
_MAX_ALPHA: Final = 1e6

# Ways to start training that leave W alone; the others (PiSSA, OLoRA, CorDA, LoftQ) train against a changed
# W.
_NEUTRAL_STARTS: Final = (None, True, False, "gaussian", "orthogonal", "eva")
# Settings of training, of other variants that are refused where they are switched on, and of where it came
# from.
_INERT: Final = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
        "inference_mode", "lora_dropout", "lora_ga_config", "loftq_config", "megatron_core", "peft_version",
        "qalora_group_size", "revision", "task_type",
        # Of Conv1D layers; Llama's are Linear, for which PEFT switches it off.
        "fan_in_fan_out",
    }
)  # fmt: skip
_REFUSED: Final = {
    "bias": "none",
    "modules_to_save": [],
    "use_dora": False,
    "use_qalora": False,
    "lora_bias": False,
    "target_parameters": [],
    "exclude_modules": [],
}


@dataclass(frozen=True, slots=True)
class _Pair:
    """One module's adapter: ``scaling * b a``, with a [rank, in] and b [out, rank]."""

    a: TensorRange
    b: TensorRange
    scaling: float


def with_adapter(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Return the checkpoint with the adapter in the folder ``path`` merged into its tensors.

    Raises ArtifactError if it is no such adapter, does not fit the checkpoint, or holds more than can be
    merged.
    """
    tensors = merged_tensors(checkpoint.tensors, path)
    folder = ModelFolder(path)
    files = tuple(file for name in (CONFIG, WEIGHTS) if (file := folder.find(name)) is not None)
    return dataclasses.replace(
        checkpoint, tensors=tensors, adapter=Adapter(path=path, name=path.resolve().name, content_files=files)
    )


def merged_tensors(tensors: Mapping[str, LazyTensor], path: Path) -> Mapping[str, LazyTensor]:
    """Return ``tensors`` with those that the adapter in ``path`` changes replaced. Raises as
    :func:`with_adapter` does.
    """
    pairs = _read_adapter(path, tensors)
    return {
        name: _merged(tensor, pairs[module])
        if (module := name.removesuffix(".weight")) in pairs and name.endswith(".weight")
        else tensor
        for name, tensor in tensors.items()
    }


def _merged(tensor: LazyTensor, pair: _Pair) -> LazyTensor:
    def load_rows(start: int, stop: int) -> npt.NDArray[np.float32]:
        left = read_rows(pair.b, start, stop).astype(np.float64) * pair.scaling
        total = left @ read_float32(pair.a).astype(np.float64)
        total += tensor.load_rows(start, stop)
        with np.errstate(over="ignore"):  # reported below, as an error instead of a warning
            values = total.astype(np.float32)
        require_finite(values, pair.b)
        return values

    # A tensor of its own, not a copy with changes: nothing that reads the stored weights past load_rows may
    # survive.
    return LazyTensor(name=tensor.name, shape=tensor.shape, dtype="F32", load_rows=load_rows)


def _read_adapter(path: Path, tensors: Mapping[str, LazyTensor]) -> dict[str, _Pair]:
    """Return the pairs by the name of their module, checked against the config of the adapter and against
    ``tensors``.
    """
    if not path.is_dir():
        raise ArtifactError(
            f"{str(path)[:200]} is no folder; --lora takes a PEFT folder with {CONFIG} and {WEIGHTS}"
        )
    folder = ModelFolder(path)
    data = folder.read_json(CONFIG)
    if data is None:
        raise ArtifactError(f"{path} has no {CONFIG}; --lora takes a PEFT folder with {CONFIG} and {WEIGHTS}")
    origin = str(path / CONFIG)
    fields = Fields(data, origin=origin)
    _refuse_variants(fields, origin)
    weights = folder.find(WEIGHTS)
    if weights is None:
        raise ArtifactError(
            f"{path} has no {WEIGHTS}; adapters in .bin files are never read, because loading them can run "
            f"code. "
            "Save the adapter with PEFT's save_pretrained"
        )
    scaling = _scaling(fields, origin)
    targets, layers = fields.get("target_modules"), _layers(fields, origin)
    _refuse_unknown(fields, origin)
    found: dict[str, dict[str, TensorRange]] = {}
    for key, stored in file_tensors(weights, folder).items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ArtifactError(
                f"{weights} holds tensor {key}, which is no part of a plain LoRA adapter; {_MERGE_FIRST}"
            )
        found.setdefault(match["module"], {})[match["side"]] = stored.source
    if not found:
        raise ArtifactError(f"{weights} holds no tensors; save the adapter again with PEFT's save_pretrained")
    _check_targets(targets, layers, set(found), tensors, weights)
    return {module: _pair(module, sides, scaling, tensors, weights) for module, sides in found.items()}


def _refuse_variants(fields: Fields, origin: str) -> None:
    """Refuse what an adapter may be or have beyond two factors for each weight."""
    if fields.get("peft_type") != "LORA":
        raise ArtifactError(
            f"{origin}: peft_type is {fields.get('peft_type')!r}, expected 'LORA'; {_MERGE_FIRST}"
        )
    if (start := fields.get("init_lora_weights")) not in _NEUTRAL_STARTS:
        raise ArtifactError(
            f"{origin}: init_lora_weights is {start!r}, which belongs to changed base weights; {_MERGE_FIRST}"
        )
    for key, accepted in _REFUSED.items():
        fields.require(key, accepted, f"or {_MERGE_FIRST}")


def _refuse_unknown(fields: Fields, origin: str) -> None:
    if unknown := fields.unasked(known=_INERT):
        raise ArtifactError(
            f"{origin} has settings that are not understood: {', '.join(unknown[:8])}; {_MERGE_FIRST}"
        )


def _scaling(fields: Fields, origin: str) -> Callable[[str], tuple[int, float]]:
    """Return a function from a module's name to its rank and the factor of its product."""
    rank = fields.integer("r", high=_MAX_RANK)
    alpha = fields.number("lora_alpha", above=0, high=_MAX_ALPHA)
    by_root = fields.boolean("use_rslora", False)
    ranks, alphas = fields.mapping("rank_pattern"), fields.mapping("alpha_pattern")
    for name, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        for key in patterns:
            if re.fullmatch(r"[\w.]+", key) is None:  # expressions of strangers are not run
                raise ArtifactError(
                    f"{origin}: {name} has {key[:80]!r}, expected a module's name or its end; {_MERGE_FIRST}"
                )
    own_ranks, own_alphas = (
        Fields(ranks, origin=f"{origin}: rank_pattern"),
        Fields(alphas, origin=f"{origin}: alpha_pattern"),
    )

    def of(module: str) -> tuple[int, float]:
        key = next((key for key in ranks if _is_called(module, key)), None)
        r = rank if key is None else own_ranks.integer(key, high=_MAX_RANK)
        key = next((key for key in alphas if _is_called(module, key)), None)
        a = alpha if key is None else own_alphas.number(key, above=0, high=_MAX_ALPHA)
        return r, a / (math.sqrt(r) if by_root else r)

    return of


def _layers(fields: Fields, origin: str) -> frozenset[int] | None:
    """Return the layers that the adapter is for; None means all."""
    if fields.get("layers_pattern") not in (None, [], "layers", ["layers"]):
        raise fields.wrong("layers_pattern", "'layers', as Llama calls them")
    value = fields.get("layers_to_transform")
    if value is None:
        return None
    items = value if isinstance(value, list) else [value]
    if not all(type(item) is int for item in items):
        raise ArtifactError(f"{origin}: layers_to_transform is {str(value)[:80]}, expected numbers of layers")
    return frozenset(items)


def _check_targets(
    targets: object,
    layers: frozenset[int] | None,
    found: set[str],
    tensors: Mapping[str, LazyTensor],
    weights: Path,
) -> None:
    """Compare the modules that the file has with those that the config names.

    A single string is an expression, which is not run for a stranger; then the file alone says what is
    adapted.
    """
    if isinstance(targets, str):
        return
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise ArtifactError(
            f"{weights.parent / CONFIG}: target_modules is {str(targets)[:80]}, expected names of modules"
        )
    modules = {name.removesuffix(".weight") for name, tensor in tensors.items() if len(tensor.shape) == 2}
    meant = {
        module
        for module in modules
        if any(_is_called(module, target) for target in targets)
        and (layers is None or ((match := _LAYER.match(module)) is not None and int(match[1]) in layers))
    }
    for difference, what in ((meant - found, "lacks"), (found - meant, "has, against the config,")):
        if difference:
            listed = sorted(difference)
            raise ArtifactError(
                f"{weights} {what} adapters for {len(listed)} modules: {', '.join(listed[:8])}; "
                f"target_modules of {CONFIG} "
                "and the base model must agree with it. Is it the adapter of another model?"
            )


def _is_called(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _pair(
    module: str,
    sides: Mapping[str, TensorRange],
    scaling: Callable[[str], tuple[int, float]],
    tensors: Mapping[str, LazyTensor],
    weights: Path,
) -> _Pair:
    base = tensors.get(f"{module}.weight")
    if base is None or len(base.shape) != 2 or module == "model.embed_tokens":
        raise ArtifactError(
            f"{weights} adapts {module}, which is no linear layer of this model; {_MERGE_FIRST}"
        )
    rank, factor = scaling(module)
    out_features, in_features = base.shape
    shapes = {side: source.shape for side, source in sides.items()}
    if shapes != {"A": (rank, in_features), "B": (out_features, rank)}:
        raise ArtifactError(
            f"{weights}: {module} has lora_A {list(shapes.get('A', ()))} and lora_B "
            f"{list(shapes.get('B', ()))}, expected "
            f"{[rank, in_features]} and {[out_features, rank]}; it is the adapter of another model"
        )
    return _Pair(sides["A"], sides["B"], factor)
