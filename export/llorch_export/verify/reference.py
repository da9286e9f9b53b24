"""The oracle of ``llorch verify``: the source's own weights in transformers, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from huggingface_hub.errors import StrictDataclassError

from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.names import StoredRows, stored_places
from llorch_export.checkpoint.norm_offset import norm_offset
from llorch_export.checkpoint.row_order import row_order
from llorch_export.config.families import FAMILIES
from llorch_export.verify.reference_adapters import merge_adapters
from llorch_export.verify.reference_config import hf_settings
from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ArtifactError


class Reference:
    """A model loaded by transformers from the same files the exporter read.

    Independent of the exporter: transformers reads the weights, the names and the config by itself. Of a GGUF
    file it leaves out most of the metadata, which is handed over as this project reads it, and
    ``rope_freqs.weight``. The tensors too are handed over for the architectures that its GGUF loader does not
    know, and where it would not find them: in a split GGUF file, and under names that training changed; and
    packed weights, as values. A family that exists only as code of checkpoints, which is never run, is
    computed by the one that does the same.
    ``description`` says where that is so.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._model = _load(transformers, torch, checkpoint)
        if checkpoint.kind == "gguf":
            _adjust_rotary(torch, self._model.model.rotary_emb, checkpoint.config)
        if checkpoint.adapters and not _is_read_here(checkpoint):
            merge_adapters(torch, self._model, checkpoint)
        self.description = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"
        if _is_read_here(checkpoint):
            self.description += ", on tensors as llorch reads them"

    @property
    def model(self) -> Any:
        """The transformers model, for looking inside."""
        return self._model

    def logits(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """Return the logits of every position, [tokens, vocabulary]."""
        with self._torch.inference_mode():
            output = self._model(self._torch.tensor([token_ids]), use_cache=False)
        logits: npt.NDArray[np.float32] = output.logits[0].numpy()
        return logits

    def hidden_states(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """Return what the final norm gives for every position, [tokens, hidden_size]."""
        with self._torch.inference_mode():
            output = self._model.base_model(self._torch.tensor([token_ids]), use_cache=False)
        states: npt.NDArray[np.float32] = output.last_hidden_state[0].numpy()
        return states


def _is_read_here(checkpoint: Checkpoint) -> bool:
    family = FAMILIES[checkpoint.config.architecture]
    unknown = bool(family.reference) or (checkpoint.kind == "gguf" and not family.gguf_in_transformers)
    return checkpoint.only_read_here or unknown


def _load(transformers: Any, torch: Any, checkpoint: Checkpoint) -> Any:
    path: Path = checkpoint.path
    # transformers loads the base model; tensors that are read here are merged already.
    merged = _is_read_here(checkpoint)
    settled = checkpoint.config if merged else checkpoint.base_config or checkpoint.config
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    try:
        if checkpoint.kind == "gguf" or FAMILIES[settled.architecture].reference:
            settings = hf_settings(settled)
            config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
            if _is_read_here(checkpoint):
                return _build(transformers, torch, checkpoint, config)
            place = {
                "pretrained_model_name_or_path": str(path.parent),
                "gguf_file": path.name,
                "config": config,
            }
        if _is_read_here(checkpoint):
            config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
            return _build(transformers, torch, checkpoint, config)
        # Weights of a pickle are refused, and so is code that comes with a checkpoint.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **place, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise ArtifactError(
            f"transformers cannot load {path} as a reference: {' '.join(str(error).split())[:300]}"
        ) from error
    return model.eval()


def _build(transformers: Any, torch: Any, checkpoint: Checkpoint, config: Any) -> Any:
    """Return a model of the config with the checkpoint's tensors put in."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    keys = FAMILIES[checkpoint.config.architecture].experts
    own = keys.names[0] if keys is not None and checkpoint.config.experts else None
    places = stored_places(checkpoint.config, own)
    with torch.no_grad():
        for name, tensor in checkpoint.tensors.items():
            stored = tensor.load() - np.float32(norm_offset(name, checkpoint.config))
            order = row_order(name, checkpoint.config)
            place = places[name]
            if order is not None:
                stored = stored[order]
            _put(torch, parameters[place.name], place, stored)
    return model.eval()


def _put(torch: Any, parameter: Any, place: StoredRows, values: npt.NDArray[np.float32]) -> None:
    """Write a tensor into the rows of a parameter that ``place`` names."""
    first, target = place.start, parameter
    if place.stack is not None:
        matrices = parameter.transpose(1, 2) if place.turned else parameter
        number, first = divmod(place.start, matrices.shape[1])
        target = matrices[number]
    last = None if place.stop is None else first + place.stop - place.start
    target = target.view(1) if target.dim() == 0 else target
    target[first : last : place.step].copy_(torch.from_numpy(values))


def _adjust_rotary(torch: Any, rotary: Any, config: LlamaConfig) -> None:
    """Apply what only GGUF files can say of rotary embedding."""
    rope = config.rope
    if len(config.ropes) > 1:
        own = rope.kind == "yarn"  # transformers has its factor for each kind of layer
        if rope.frequency_factors is not None or (rope.attention_factor != 1 and not own):
            raise ArtifactError("transformers has no rotary factors beside rotations by kind of layer")
        return
    if rope.frequency_factors is not None:
        rotary.inv_freq /= torch.tensor(rope.frequency_factors, dtype=rotary.inv_freq.dtype)
    rotary.attention_scaling = rope.attention_factor
