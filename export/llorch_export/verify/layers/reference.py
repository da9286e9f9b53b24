"""The reference's inner values: what transformers' modules read and wrote, and its attention from inside.

Takes a model that :class:`llorch_export.verify.reference.Reference` loaded; gives arrays under the modules'
names, of routers and experts under those of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.expert_names import own_name
from llorch_export.checkpoint.names import own_module
from llorch_export.checkpoint.row_order import head_order
from llorch_export.config.families import FAMILIES
from llorch_serve.artifact.manifest import LlamaConfig

Array = npt.NDArray[np.float32]

_OBSERVED: Final = "llorch_observed"


@dataclass(frozen=True, slots=True)
class AttentionTrace:
    """One layer's attention from inside.

    query, key, value: after RoPE, [heads, tokens, head_dim]. scores: before softmax, [heads, tokens, tokens].
    seen: which of them the mask lets count, [tokens, tokens].
    """

    query: Array
    key: Array
    value: Array
    scores: Array
    seen: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Inputs and outputs of every module by its name, without the batch axis; attention by layer."""

    inputs: dict[str, Array] = field(default_factory=dict)
    outputs: dict[str, Array] = field(default_factory=dict)
    attention: dict[int, AttentionTrace] = field(default_factory=dict)


def observe(model: Any, token_ids: list[int], config: LlamaConfig) -> ReferenceRun:
    """Run a prompt through the model and keep what its modules compute, under the names and in the order of
    elements that ``config``'s graph has. Changes the model's kind of attention.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    run, family = ReferenceRun(), FAMILIES[config.architecture]

    def attention(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float,
        softcap: float | None = None,
        s_aux: Any = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        """Attention from its definition, on queries and keys as the model hands them over: already
        rotated.
        """
        group = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        run.attention[module.layer_idx] = AttentionTrace(
            query=_turned(_array(query), config),
            key=_turned(_array(key), config),
            value=_array(value),
            scores=_array(scores),
            seen=(attention_mask[0, 0] == 0).numpy().copy(),
        )
        weights = _shares(torch, scores + attention_mask, s_aux)
        mixed = weights @ value.repeat_interleave(group, 1)
        return mixed.transpose(1, 2).contiguous(), weights

    AttentionInterface.register(_OBSERVED, attention)
    AttentionMaskInterface.register(_OBSERVED, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.set_attn_implementation(_OBSERVED)
    hooks = [
        module.register_forward_hook(
            _recorder(torch, run, own_name(own_module(name, family)), len(token_ids))
        )
        for name, module in model.named_modules()
        if name
    ]
    try:
        with torch.inference_mode():
            model(torch.tensor([token_ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for name, value in run.outputs.items():
        if name.endswith(("q_proj", "k_proj")):
            heads = _turned(value.reshape(*value.shape[:-1], -1, config.head_dim), config)
            run.outputs[name] = heads.reshape(value.shape)
    return run


def _shares(torch: Any, scores: Any, sinks: Any) -> Any:
    """Return the softmax of scores [batch, heads, tokens, tokens], in which each head's sink takes a share
    and stands for no value.
    """
    if sinks is None:
        return scores.softmax(-1)
    more = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, more], -1).softmax(-1)[..., :-1]


def _turned(heads: Array, config: LlamaConfig) -> Array:
    """Return heads [..., head_dim] with pairs half a head apart, where the family has them side by side."""
    if not FAMILIES[config.architecture].interleaved:
        return heads
    return heads[..., np.argsort(head_order(config))]


def _recorder(torch: Any, run: ReferenceRun, name: str, tokens: int) -> Any:
    def record(_module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        result = output[0] if isinstance(output, tuple) else output
        for kept, values in ((run.inputs, arguments[:1]), (run.outputs, (result,))):
            for value in values:
                if torch.is_tensor(value) and value.is_floating_point():
                    kept[name] = _by_token(_array(value), tokens)

    return record


def _by_token(array: Array, tokens: int) -> Array:
    """Return an array with its tokens in front, where the model had its heads there."""
    behind = array.ndim == 3 and array.shape[0] != tokens and array.shape[1] == tokens
    return array.swapaxes(0, 1) if behind else array


def _array(tensor: Any) -> Array:
    """Copy a tensor out, since modules may change theirs in place; without the batch axis, which values of
    routers and experts do not have.
    """
    array: Array = (tensor[0] if tensor.dim() > 2 else tensor).numpy().copy()
    return array
