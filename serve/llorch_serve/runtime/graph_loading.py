"""One graph of an artifact in the runtime: its session's settings, and whether it is the one that the
manifest describes.

``session.py`` loads an artifact's graphs here; sessions for other tools' graphs take the settings alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from llorch_serve.artifact.folder import Artifact
from llorch_serve.artifact.manifest import KvDtype, Recipe, cache_names
from llorch_serve.errors import ArtifactError
from llorch_serve.providers import ActiveProvider, byte_settings, require_exact_bytes
from llorch_serve.python_child import reset, set_meanwhile


def runtime_options(runtime: Any, threads: int) -> Any:
    """Return onnxruntime's options for a session that runs on so many threads."""
    runtime.set_default_logger_severity(3)
    options = runtime.SessionOptions()
    # An explicit count also keeps the runtime from pinning threads to CPUs outside the process's cpuset.
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # A session's threads go on spinning for a while after a call. The threads of a prompt's graph would take
    # the processors from the one that decodes, and those of both from whoever sends the answers.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return options


_PLAIN_ATTENTION: Final = "ORT_GQA_DISABLE_FLASH_ATTENTION"


class _KernelChoice:
    """Which kernel sessions are being made with, and how many are, in all threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._making = {True: 0, False: 0}  # by whether it is the plain one

    @contextlib.contextmanager
    def made(self, *, plain: bool) -> Iterator[None]:
        """Wait until no session of the other kernel is being made, and choose this one inside."""
        with self._changed:
            self._changed.wait_for(lambda: not self._making[not plain])
            if plain and not self._making[plain]:
                set_meanwhile(_PLAIN_ATTENTION, "1")
            self._making[plain] += 1
        try:
            yield
        finally:
            with self._changed:
                self._making[plain] -= 1
                if plain and not self._making[plain]:
                    reset(_PLAIN_ATTENTION)
                self._changed.notify_all()


_CHOICE: Final = _KernelChoice()


@contextlib.contextmanager
def attention_kernel(*, plain: bool | None) -> Iterator[None]:
    """Choose the CPU's attention kernel for sessions that are made inside: plain, or in tiles, as the runtime
    does by itself; None: either, for one that never runs.

    Over int8 and for whole chunks of prompts the plain one is the faster. The runtime reads the choice from
    the environment, which all threads share, when a session is made: one of the other kernel waits.
    """
    if plain is None:
        yield
        return
    with _CHOICE.made(plain=plain):
        yield


def graph_options(recipe: Recipe, runtime: Any, threads: int) -> Any:
    """Return onnxruntime's options for a graph of this recipe: those of :func:`runtime_options`, and how it
    multiplies bytes.

    Raises ProviderError for a runtime that would abort.
    """
    options = runtime_options(runtime, threads)
    if recipe.multiplies_bytes and (settings := byte_settings()):
        require_exact_bytes(runtime)
        for setting in settings.items():
            options.add_session_config_entry(*setting)
    return options


def load_graph(
    path: Path,
    recipe: Recipe,
    runtime: Any,
    threads: int,
    provider: ActiveProvider,
    *,
    plain: bool,
    packed: bool = True,
) -> Any:
    """Load one graph on a provider. plain: take the CPU's plain attention kernel, see
    :func:`attention_kernel`.

    packed: arrange the weights for their kernels, which takes most of a load's time and is another
        computation; False: only to see whether the graph is sound.
    Raises ArtifactError if the runtime does not take the graph, and ProviderError for one that would abort.
    """
    options = graph_options(recipe, runtime, threads)
    if not packed:
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        with attention_kernel(plain=plain if packed else None):
            return runtime.InferenceSession(str(path), sess_options=options, **provider.add_to(options))
    except Exception as error:
        from llorch_serve.providers.graph_versions import newer_than_runtime  # loads protobuf: on demand

        text = " ".join(str(error).split())
        if (newer := newer_than_runtime(path, text, runtime)) is not None:
            raise ArtifactError(newer) from error
        raise ArtifactError(f"{path} cannot be loaded: {text[:500]}. Export the model again.") from error


_ONNX_TYPES: Final = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "bfloat16": "tensor(bfloat16)",
    "int32": "tensor(int32)",
    "int64": "tensor(int64)",
    "int8": "tensor(int8)",
}


def check_signature(artifact: Artifact, path: Path, session: Any, kv_dtype: KvDtype) -> None:
    """Compare a graph's inputs and outputs with the manifest's: names, types, and sizes where they are fixed.

    kv_dtype: what its cache holds, where the manifest lists those of a graph with another.
    Raises ArtifactError.
    """
    manifest = artifact.manifest
    cache = cache_names(manifest.kv)
    for what, specs, nodes in (
        ("inputs", manifest.inputs, session.get_inputs()),
        ("outputs", manifest.outputs, session.get_outputs()),
    ):
        expected = {
            spec.name: (_ONNX_TYPES[kv_dtype if spec.name in cache else spec.dtype], _fixed(spec.shape))
            for spec in specs
        }
        found = {node.name: (node.type, _fixed(node.shape)) for node in nodes}
        odd = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
        if odd:
            raise ArtifactError(
                f"{path}: {what} differ from the manifest ({', '.join(odd[:5])}); export the model again"
            )


def _fixed(shape: Sequence[int | str | None]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in shape)
