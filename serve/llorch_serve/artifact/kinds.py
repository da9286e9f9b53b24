"""The makers of folders that can be served."""

from __future__ import annotations

import enum


class ModelKind(enum.Enum):
    """The maker of a folder that can be served. The value is shown to people and sent to clients."""

    LLORCH = "llorch"
    GENAI = "onnxruntime-genai"
    OPTIMUM = "optimum"
