"""llorch in Python: export a model, load an artifact or connect to a worker, and ask it.

::

    with llorch.load("artifacts/smollm2") as model:
        print(model.chat("What is the capital of France?", max_tokens=16).text)

A loaded model and one behind a worker are the same :class:`Model`; :class:`AsyncModel` is for an event loop.
Importing this package imports nothing else: neither a runtime nor gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from llorch.answers import Answer as Answer
    from llorch.answers import Chunk as Chunk
    from llorch.asynchronous import AsyncModel as AsyncModel
    from llorch.blocking import Model as Model
    from llorch.exporting import export as export
    from llorch.opening import connect as connect
    from llorch.opening import connect_async as connect_async
    from llorch.opening import load as load
    from llorch.opening import load_async as load_async
    from llorch_serve.errors import ArtifactError as ArtifactError
    from llorch_serve.errors import InvalidRequestError as InvalidRequestError
    from llorch_serve.errors import LlorchError as LlorchError
    from llorch_serve.errors import ProviderError as ProviderError
    from llorch_serve.errors import QueueFullError as QueueFullError
    from llorch_serve.errors import RequestError as RequestError
    from llorch_serve.errors import ResourceError as ResourceError
    from llorch_serve.errors import UnavailableError as UnavailableError
    from llorch_serve.errors import UnsupportedError as UnsupportedError
    from llorch_serve.errors import UsageError as UsageError
    from llorch_serve.errors import WorkerError as WorkerError
    from llorch_serve.requests import ContinuationScore as ContinuationScore
    from llorch_serve.requests import ModelInfo as ModelInfo
    from llorch_serve.requests import ToolCall as ToolCall

_ERRORS: Final = (
    "ArtifactError",
    "InvalidRequestError",
    "LlorchError",
    "ProviderError",
    "QueueFullError",
    "RequestError",
    "ResourceError",
    "UnavailableError",
    "UnsupportedError",
    "UsageError",
    "WorkerError",
)
_PLACES: Final = {
    "Answer": "llorch.answers",
    "AsyncModel": "llorch.asynchronous",
    "Chunk": "llorch.answers",
    "ContinuationScore": "llorch_serve.requests",
    "Model": "llorch.blocking",
    "ModelInfo": "llorch_serve.requests",
    "ToolCall": "llorch_serve.requests",
    "connect": "llorch.opening",
    "connect_async": "llorch.opening",
    "export": "llorch.exporting",
    "load": "llorch.opening",
    "load_async": "llorch.opening",
    **dict.fromkeys(_ERRORS, "llorch_serve.errors"),
}
"""Where each name is defined; it is imported when it is first used."""

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
