"""Exports of tiny checkpoints, and sessions on them, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import KvDtype
from llorch_serve.config import SessionConfig
from llorch_serve.runtime.fixed_session import FixedSession, open_fixed
from llorch_serve.runtime.opening import open_session
from llorch_serve.runtime.session import DecoderSession

Logits = npt.NDArray[np.float32]


def silent(phase: str, done: int, total: int) -> None:
    """Take progress and show nothing."""


def export_tiny(source: Path, output: Path, **options: Any) -> Artifact:
    """Export with the given :class:`ExportOptions`; in fp32 unless said otherwise."""
    options.setdefault("precision", "fp32")
    return export(ExportOptions(source=str(source), output=output, **options), silent).artifact


def open_tiny(artifact: Artifact, *, slots: int = 2, kv_dtype: KvDtype | None = None) -> DecoderSession:
    """Open a session on one thread."""
    config = SessionConfig(threads=1, slots=slots, kv_dtype=kv_dtype)
    return open_session(artifact, config, lambda report: None)


def open_fixed_tiny(artifact: Artifact, *, slots: int = 2, **options: Any) -> FixedSession:
    """Open a session on graphs of fixed shapes, on one thread."""
    return open_fixed(artifact, SessionConfig(threads=1, slots=slots, **options), lambda report: None)


def all_logits(artifact: Artifact, token_ids: Sequence[int]) -> Logits:
    """Return the logits of every position, from one prefill."""
    return open_tiny(artifact).prefill(0, token_ids, 0, range(len(token_ids))).copy()


def random_ids(count: int, *, seed: int = 1, vocabulary: int = 512) -> list[int]:
    """Return token ids drawn uniformly."""
    ids: list[int] = np.random.default_rng(seed).integers(0, vocabulary, count).tolist()
    return ids


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, by its path relative to it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
