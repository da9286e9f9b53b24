"""Find and open what the user points at: a GGUF file, a Hugging Face folder or a hub id.

Input is the command line's SOURCE; output is a :class:`Checkpoint`, or only its config.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from llorch_export.checkpoint.base import Checkpoint
from llorch_export.checkpoint.gguf import gguf_config, gguf_model_name, gguf_tensors
from llorch_export.checkpoint.gguf_header import read_header
from llorch_export.tokenizer import tokenizer_from_gguf
from llorch_serve.artifact import LlamaConfig
from llorch_serve.errors import ArtifactError


def open_checkpoint(source: str) -> Checkpoint:
    """Open a checkpoint."""
    path = Path(source)
    header = read_header(path)
    config = gguf_config(header)
    return Checkpoint(
        kind="gguf",
        path=path,
        name=gguf_model_name(path),
        config=config,
        tensors=gguf_tensors(header, config),
        tokenizer=tokenizer_from_gguf(header.metadata, vocab_size=config.vocab_size, origin=str(path)),
        content_files=(path,),
        licence_files=(),
    )


def open_config(source: str) -> LlamaConfig:
    """Read only the config."""
    return gguf_config(read_header(Path(source)))


def fingerprint(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a checkpoint's content; see :func:`fingerprint_files`."""
    return fingerprint_files(checkpoint.content_files, progress)


def fingerprint_files(files: Sequence[Path], progress: Callable[[int], None] | None = None) -> str:
    """Return a SHA-256 in hex over names, sizes and bytes of ``files``; ``progress`` is told the bytes read.

    The name of a lone file (a GGUF) does not count: renaming it changes nothing.
    """
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                name = path.name if len(files) > 1 else ""
                digest.update(f"{name}\0{path.stat().st_size}\0".encode())
                while chunk := file.read(2**22):
                    digest.update(chunk)
                    if progress is not None:
                        progress(len(chunk))
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
