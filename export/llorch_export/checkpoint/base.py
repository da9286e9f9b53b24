"""The exporter's view of a checkpoint, whatever file format it came in.

Tensors carry Hugging Face's names (``model.layers.0.self_attn.q_proj.weight``) and orientation (``[out,
in]``), with GGUF's permutation of the query and key rows already undone; nothing is read before it is asked
for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from llorch_export.checkpoint.codes import Codes
from llorch_export.config.embedding import Embedding
from llorch_serve.artifact.manifest import GenerationDefaults, LlamaConfig, ScaleType

# 8 MiB as float32: work of this size hides the overhead of numpy and of system calls, and fits many times
# into memory.
CHUNK_ELEMENTS: Final = 2**21


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor on disk.

    dtype: storage type as the source names it (``BF16``, ``Q4_1``).
    load_rows: reads rows ``start`` to ``stop`` (excluded) and returns them as float32 of ``[stop - start,
        *shape[1:]]``; each call reads anew, nothing is kept. Raises ArtifactError if they cannot be read or
        are not finite.
    read_blocks: for a type that is stored in quantised blocks, reads rows ``start`` to ``stop`` (excluded) as
        stored bytes [stop - start, bytes of a row], in the order of ``shape``'s rows.
    load_whole: of a tensor whose every row depends on the whole of another: computes all of it at once, which
        costs as much as some rows do.
    packed: how a tool has packed it, in words; None: it has not.
    codes: of a packed matrix that is codes with scales.
    narrow_type: the type of a file of packed weights that holds every value of a plain tensor as it is; None
        where that does not matter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    load_rows: Callable[[int, int], npt.NDArray[np.float32]]
    read_blocks: Callable[[int, int], npt.NDArray[np.uint8]] | None = None
    load_whole: Callable[[], npt.NDArray[np.float32]] | None = None
    packed: str | None = None
    codes: Codes | None = None
    narrow_type: ScaleType | None = None

    def load(self) -> npt.NDArray[np.float32]:
        """Read all of it; for matrices of a large model, :meth:`row_chunks` is the way that stays small."""
        return self.load_rows(0, self.shape[0])

    def row_chunks(self) -> Iterator[npt.NDArray[np.float32]]:
        """Read it from the first row to the last in chunks of about ``CHUNK_ELEMENTS``.

        Memory holds a chunk; all of it where the tensor has ``load_whole``, until the last chunk is given.
        """
        rows = self.shape[0]
        step = max(1, CHUNK_ELEMENTS // math.prod(self.shape[1:]))
        whole = None if self.load_whole is None else self.load_whole()
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield self.load_rows(start, stop) if whole is None else whole[start:stop]


@dataclass(frozen=True, slots=True)
class TokenizerAssets:
    """What text needs besides weights.

    tokenizer_json: content of tokenizer.json.
    chat_templates: sources by name; empty, or one of them is ``default``.
    bos_token_id, eos_token_id: as the checkpoint names them; chat templates write them.
    stop_token_ids: every end-of-sequence and end-of-turn token, ascending, without duplicates.
    template_tokens: as :class:`~llorch_serve.artifact.manifest.Manifest` has them.
    named_tokens: the text of each role's token, whether a template mentions it or not.
    notices: what a person should know about it, a line each.
    """

    tokenizer_json: bytes
    chat_templates: Mapping[str, str]
    bos_token_id: int | None
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    template_tokens: dict[str, str] | None = None
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that has been merged into a checkpoint's tensors.

    name: its folder's. weight: what its change was multiplied by. content_files: the files that were read.
    notices: what a person should know about it, a line each.
    """

    path: Path
    name: str
    content_files: tuple[Path, ...]
    weight: float = 1.0
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose header has been read and checked against its config.

    path: the GGUF file or the folder.
    name: a short model name for people and for ``model_id``.
    tensors: exactly the tensors that ``config`` calls for, by Hugging Face name.
    content_files: the files whose bytes make the fingerprint, in a fixed order.
    licence_files: files that travel along with the weights.
    adapters: what ``tensors`` has been merged with, if anything.
    base_config: the config before that, where ``config`` may differ by it.
    notices: what a person should know of how it was read, a line each.
    only_read_here: transformers cannot read these files as they are, since names or files are arranged in a
        way of their own, or since weights are packed, for which it needs other libraries.
    ignored_settings, code_not_run: as in :class:`llorch_export.config.hf.ReadConfig`.
    origin: repository and commit of a hub, where the files lie in the hub's cache.
    hub: which one; None: the Hugging Face hub.
    embedding: how it turns texts into vectors; None: it is a language model.
    """

    kind: Literal["gguf", "safetensors"]
    path: Path
    name: str
    config: LlamaConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer: TokenizerAssets
    content_files: tuple[Path, ...]
    licence_files: tuple[Path, ...]
    adapters: tuple[Adapter, ...] = ()
    base_config: LlamaConfig | None = None
    notices: tuple[str, ...] = ()
    only_read_here: bool = False
    ignored_settings: tuple[str, ...] = ()
    code_not_run: tuple[str, ...] = ()
    origin: tuple[str, str] | None = None
    hub: Literal["modelscope"] | None = None
    embedding: Embedding | None = None
