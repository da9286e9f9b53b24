"""Loading another tool's graph and holding its inputs and outputs against what the folder's config says.

Input is a :class:`ForeignModel`; output a loaded graph whose tensors are all known by name, type and shape,
so that a session may bind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from llorch_serve.errors import ArtifactError
from llorch_serve.foreign.model import ForeignModel
from llorch_serve.providers import CPU, Placement, import_runtime, placement
from llorch_serve.runtime.graph_loading import attention_kernel, runtime_options

# The first version whose check of where external data lies has been tested.
MIN_ONNXRUNTIME: Final = "1.24"
ATTENTION_IN_PLACE: Final = "GroupQueryAttention"

_WHOLE: Final[dict[str, type[np.generic]]] = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
_REAL: Final[dict[str, type[np.generic]]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True, slots=True)
class LoadedGraph:
    """A graph that is ready to run.

    runtime, session: the onnxruntime module and its InferenceSession.
    ids_type, mask_type, positions_type: element types of the inputs; positions_type is None where there is
        none.
    logits_type, cache_type: of the logits and of keys and values.
    last_logits: the graph computes the last token's logits alone; else those of every token.
    """

    runtime: Any
    session: Any
    placement: Placement
    ids_type: type[np.generic]
    mask_type: type[np.generic]
    positions_type: type[np.generic] | None
    logits_type: type[np.generic]
    cache_type: type[np.generic]
    last_logits: bool

    def logits_rows(self, tokens: int) -> int:
        """Return how many rows of logits a sequence has after a call with so many tokens."""
        return 1 if self.last_logits else tokens


def load_graph(model: ForeignModel, threads: int) -> LoadedGraph:
    """Load and check a model's graph.

    Raises ProviderError if the runtime is missing, ArtifactError if the graph is damaged or not the decoder
    that the folder's config describes.
    """
    runtime = import_runtime(MIN_ONNXRUNTIME)
    try:
        with attention_kernel(plain=False):
            session = runtime.InferenceSession(
                str(model.graph_path),
                sess_options=runtime_options(runtime, threads),
                providers=[CPU],
                enable_fallback=False,
            )
    except Exception as error:  # the runtime's own classes of errors share no narrower base
        from llorch_serve.providers.graph_versions import newer_than_runtime  # loads protobuf: on demand

        text = " ".join(str(error).split())
        if (newer := newer_than_runtime(model.graph_path, text, runtime)) is not None:
            raise ArtifactError(newer) from error
        raise ArtifactError(
            f"{model.graph_path} cannot be loaded: {text[:500]}. Build it again, for the cpu provider."
        ) from error
    if model.shared_cache:
        _check_appends_in_place(model, session)
    return _checked(model, runtime, session)


def _check_appends_in_place(model: ForeignModel, session: Any) -> None:
    """Check that every layer's attention is the operator that takes one buffer as past and present."""
    parts = session.get_provider_graph_assignment_info()
    found = sum(node.op_type == ATTENTION_IN_PLACE for part in parts for node in part.get_nodes())
    if found != model.manifest.model.layers:
        raise ArtifactError(
            f"{model.graph_path} has {found} {ATTENTION_IN_PLACE} nodes, expected one for each of "
            f"{model.manifest.model.layers} layers as its past_present_share_buffer says; build it again"
        )


def _checked(model: ForeignModel, runtime: Any, session: Any) -> LoadedGraph:
    names, layers = model.names, range(model.manifest.model.layers)
    inputs = {node.name: node for node in session.get_inputs()}
    outputs = {node.name: node for node in session.get_outputs()}
    if "use_cache_branch" in inputs:
        raise _wrong(model, "is a merged decoder of an older Optimum", "one graph with past and present")
    first = names.past(0)[0]
    if first not in inputs:
        raise _wrong(model, "keeps no keys and values", f"inputs like {first} (text-generation-with-past)")
    if 2 * len(layers) > len(inputs):  # before names are made for a number that anyone may have written
        raise _wrong(model, f"has {len(inputs)} inputs", f"two for each of {len(layers)} layers, and more")
    past = [name for layer in layers for name in names.past(layer)]
    present = [name for layer in layers for name in names.present(layer)]
    _check_names(model, "inputs", inputs, [names.input_ids, names.attention_mask, *past], names.position_ids)
    _check_names(model, "outputs", outputs, [names.logits, *present], None)
    cache = {_cache_type(model, node) for node in (*map(inputs.get, past), *map(outputs.get, present))}
    if len(cache) != 1:
        raise _wrong(model, "has keys and values of several types", "one type")
    positions = inputs.get(names.position_ids)
    return LoadedGraph(
        runtime=runtime,
        session=session,
        placement=placement(session, CPU),
        ids_type=_type(model, inputs[names.input_ids], 2, _WHOLE),
        mask_type=_type(model, inputs[names.attention_mask], 2, _WHOLE),
        positions_type=None if positions is None else _type(model, positions, 2, _WHOLE),
        logits_type=_logits_type(model, outputs[names.logits]),
        cache_type=cache.pop(),
        last_logits=outputs[names.logits].shape[1] == 1,
    )


def _check_names(
    model: ForeignModel, what: str, found: dict[str, Any], expected: list[str], optional: str | None
) -> None:
    odd = sorted({*found} - {*expected, optional}) + [name for name in expected if name not in found]
    if odd:
        raise _wrong(
            model, f"has {what} that differ: {', '.join(odd[:5])}", f"{', '.join(expected[:4])} and so on"
        )


def _logits_type(model: ForeignModel, node: Any) -> type[np.generic]:
    kind = _type(model, node, 3, _REAL)
    _check_size(model, node, 2, model.manifest.model.vocab_size)
    return kind


def _cache_type(model: ForeignModel, node: Any) -> type[np.generic]:
    kind = _type(model, node, 4, _REAL)
    _check_size(model, node, 1, model.manifest.model.kv_heads)
    _check_size(model, node, 3, model.manifest.model.head_dim)
    return kind


def _type(model: ForeignModel, node: Any, rank: int, known: dict[str, type[np.generic]]) -> type[np.generic]:
    if node.type not in known or len(node.shape) != rank:
        kinds = " or ".join(known)
        raise _wrong(
            model, f"has {node.name} as {node.type} of rank {len(node.shape)}", f"{kinds} of rank {rank}"
        )
    return known[node.type]


def _check_size(model: ForeignModel, node: Any, axis: int, expected: int) -> None:
    """Compare a dimension where the graph fixes it; symbolic ones are taken from the config."""
    shape: Sequence[int | str | None] = node.shape
    if isinstance(shape[axis], int) and shape[axis] != expected:
        raise _wrong(
            model, f"has {node.name} with {shape[axis]} on axis {axis}", f"{expected} as its config says"
        )


def _wrong(model: ForeignModel, found: str, expected: str) -> ArtifactError:
    return ArtifactError(
        f"{model.graph_path} {found}; expected {expected}. Export it again as a decoder of text."
    )
