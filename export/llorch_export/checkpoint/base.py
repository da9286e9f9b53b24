"""The exporter's view of a checkpoint, whatever file format it came in.

Tensors carry Hugging Face's names (``model.layers.0.self_attn.q_proj.weight``) and orientation (``[out, in]``),
with GGUF's permutation of the query and key rows already undone; nothing is read before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from llorch_serve.manifest import GenerationDefaults, LlamaConfig


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor on disk.

    dtype: storage type as the source names it (``BF16``, ``Q4_1``).
    load: reads and returns it as float32 of ``shape``; each call reads anew, nothing is kept.
    read_blocks: for a type that is stored in quantised blocks, reads rows ``start`` to ``stop`` (excluded) as stored
        bytes [stop - start, bytes of a row], in the order of ``shape``'s rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], npt.NDArray[np.float32]]
    read_blocks: Callable[[int, int], npt.NDArray[np.uint8]] | None = None


@dataclass(frozen=True, slots=True)
class TokenizerAssets:
    """What text needs besides weights.

    tokenizer_json: content of tokenizer.json.
    bos_token_id, eos_token_id: as the checkpoint names them; chat templates write them.
    stop_token_ids: every end-of-sequence and end-of-turn token, ascending, without duplicates.
    """

    tokenizer_json: bytes
    chat_template: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    generation: GenerationDefaults


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose header has been read and checked against its config.

    path: the GGUF file or the folder.
    name: a short model name for people and for ``model_id``.
    tensors: exactly the tensors that ``config`` calls for, by Hugging Face name.
    content_files: the files whose bytes make the fingerprint, in a fixed order.
    licence_files: files that travel along with the weights.
    """

    kind: Literal["gguf", "safetensors"]
    path: Path
    name: str
    config: LlamaConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer: TokenizerAssets
    content_files: tuple[Path, ...]
    licence_files: tuple[Path, ...]
