"""Which recording of kernels a call makes or replays, as CUDA's provider is told."""

from __future__ import annotations

from typing import Any, Final

from llorch_serve.providers import ActiveProvider

_GRAPH_ID: Final = "gpu_graph_id"  # onnxruntime's name, of a run

UNRECORDED: Final = -1
"""The number of no recording: the call's kernels are launched one by one."""


def run_options(runtime: Any, provider: ActiveProvider, recording: int = UNRECORDED) -> Any:
    """Return onnxruntime's options of a call; None where the provider records nothing.

    recording: its number. The first call with a number records, those after it replay.
    """
    if not provider.captures:
        return None
    options = runtime.RunOptions()
    options.add_run_config_entry(_GRAPH_ID, str(recording))
    return options
