"""PEFT as the oracle of merged adapters: it makes them, and computes with them, in float64."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def base_model(folder: Path) -> Any:
    """Load a tiny checkpoint by transformers, in float64."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def make_adapter(
    folder: Path, path: Path, *, resize: int | None = None, seed: int = 0, **settings: Any
) -> None:
    """Train an adapter for the checkpoint in ``folder``, by drawing all that is trainable, and save it.

    resize: rows of the vocabulary. settings: of PEFT's LoraConfig.
    """
    import peft

    model = base_model(folder)
    if resize is not None:
        model.resize_token_embeddings(resize, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
        draw(adapted, seed)
        adapted.float().save_pretrained(path, save_embedding_layers=resize is not None or "auto")


def draw(adapted: Any, seed: int) -> None:
    """Change all that is trainable by random numbers, to values that float32 has."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad or ".lora_" in name:  # those of a published one are frozen
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
                parameter.copy_((parameter + noise).float())


def adapted_model(folder: Path, path: Path, *, resize: int | None = None) -> Any:
    """Load the checkpoint with the adapter in ``path`` on it, not merged."""
    import peft

    model = base_model(folder)
    if resize is not None:
        model.resize_token_embeddings(resize, mean_resizing=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, path, autocast_adapter_dtype=False).eval()


def logits(model: Any, ids: list[int]) -> npt.NDArray[np.float64]:
    """Return the logits of every position."""
    import torch

    with torch.inference_mode():
        found: npt.NDArray[np.float64] = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return found


def merged_weights(model: Any) -> dict[str, npt.NDArray[np.float64]]:
    """Return all weights by name, after PEFT has merged the adapter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = model.merge_and_unload()
    return {name: value.detach().numpy() for name, value in merged.state_dict().items()}
