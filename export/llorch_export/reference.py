"""The oracle of ``llorch verify``: the source's own weights in transformers, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.base import Checkpoint
from llorch_serve.errors import ArtifactError


class Reference:
    """A model loaded by transformers from the same files the exporter read.

    Independent of the exporter: transformers reads the weights, the names and the config by itself. Only GGUF's
    ``rope_freqs.weight``, which transformers leaves out, is applied here.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._model = _load(transformers, torch, checkpoint)
        factors = checkpoint.config.rope.frequency_factors
        if factors is not None:
            rotary = self._model.model.rotary_emb
            rotary.inv_freq /= torch.tensor(factors, dtype=rotary.inv_freq.dtype)
        self.description = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"

    def logits(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """Return the logits of every position, [tokens, vocabulary]."""
        with self._torch.inference_mode():
            output = self._model(self._torch.tensor([token_ids]), use_cache=False)
        logits: npt.NDArray[np.float32] = output.logits[0].numpy()
        return logits


def _load(transformers: Any, torch: Any, checkpoint: Checkpoint) -> Any:
    path: Path = checkpoint.path
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if checkpoint.kind == "gguf":
        place = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        # Weights of a pickle are refused, and so is code that comes with a checkpoint.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **place, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ArtifactError(
            f"transformers cannot load {path} as a reference: {' '.join(str(error).split())[:300]}"
        ) from error
    return model.eval()
