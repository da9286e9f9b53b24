"""The likeliest tokens of each row as a graph, so that draws from few tokens need no other logits.

Input and output as :func:`leading_model` says. The graph is made here, of ONNX's own operators, and tried on
a provider before it is relied upon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llorch_serve.errors import ProviderError
from llorch_serve.providers import ActiveProvider
from llorch_serve.runtime.greedy_graph import trial_logits
from llorch_serve.runtime.recordings import run_options
from llorch_serve.runtime.small_graph import FLOAT32, FLOAT64, INT64, SmallGraph, open_small

LEADING: Final = 128
"""Tokens of each row: more than the largest top-k that a chat model was seen to recommend, 64. They are a
hundredth of the bytes of 40,000 logits.
"""

_TOTALS: Final = 1e-6  # how far a total may be from numpy's in float64, as part of it
_TEMPERATURES: Final = (1.0, 0.2, 3.0)


def leading_model(vocab_size: int) -> bytes:
    """Return an ONNX model: ``logits`` float32 [rows, vocab_size] and ``scale`` float32 [rows, 1], one over
    the temperature, to ``scores`` float32 and ``ids`` int64 [rows, LEADING], the largest logits first, and
    ``totals`` float64 [rows].

    A total is the sum of exp((logit - the largest) * scale) over all tokens; not a number where a logit is
    not finite. Which of equal logits come is up to the provider.
    """
    assert vocab_size > LEADING
    graph = SmallGraph("leading")
    graph.constant("zero", np.zeros((), np.float32))
    graph.constant("count", np.array([LEADING], np.int64))
    graph.constant("last_axis", np.array([-1], np.int64))
    graph.node("ReduceMax", ["logits", "last_axis"], ["best"], keepdims=1)
    graph.node("Sub", ["logits", "best"], ["below"])
    graph.node("Mul", ["below", "scale"], ["scaled"])
    graph.node("Exp", ["scaled"], ["weights"])
    graph.node("Cast", ["weights"], ["wide"], to=FLOAT64)  # or a sum of so many is off by some 1e-5
    graph.node("ReduceSum", ["wide", "last_axis"], ["finite_totals"], keepdims=0)
    graph.node("Mul", ["logits", "zero"], ["nothing"])
    graph.node("ReduceSum", ["nothing", "last_axis"], ["none"], keepdims=0)
    graph.node("Cast", ["none"], ["wide_none"], to=FLOAT64)
    graph.node("Add", ["finite_totals", "wide_none"], ["totals"])
    graph.node("TopK", ["logits", "count"], ["scores", "ids"], axis=-1, largest=1, sorted=1)
    graph.takes("logits", FLOAT32, (None, vocab_size))
    graph.takes("scale", FLOAT32, (None, 1))
    graph.gives("scores", FLOAT32, (None, LEADING))
    graph.gives("ids", INT64, (None, LEADING))
    graph.gives("totals", FLOAT64, (None,))
    return graph.serialised()


def leading_session(runtime: Any, provider: ActiveProvider, vocab_size: int) -> Any:
    """Load the graph on a provider and try it; return onnxruntime's session.

    Raises ProviderError if the provider does not run all of it, or gives others than the likeliest tokens.
    """
    logits = trial_logits(vocab_size)
    scale = np.resize(1 / np.array(_TEMPERATURES), (len(logits), 1)).astype(np.float32)
    names = ("scores", "ids", "totals")
    what = "does not find the likeliest tokens"
    with open_small(runtime, provider, leading_model(vocab_size), what) as session:
        found = session.run(names, {"logits": logits, "scale": scale}, run_options(runtime, provider))
    if fault := _fault(logits, scale, dict(zip(names, found, strict=True))):
        raise ProviderError(f"{provider.runtime_name} {what}: {fault}")
    return session


def _fault(
    logits: npt.NDArray[np.float32], scale: npt.NDArray[np.float32], found: Mapping[str, npt.NDArray[Any]]
) -> str | None:
    """Return what is wrong with what a provider gave for the trial, or None."""
    for row, (values, ids, scores, total) in enumerate(
        zip(logits, found["ids"], found["scores"], found["totals"], strict=True)
    ):
        if not np.isfinite(values).all():
            if np.isfinite(total):
                return f"row {row} has a logit that is not finite, and the total {total}"
            continue
        expected = np.sort(values)[::-1][: len(scores)]
        if not (np.array_equal(scores, expected) and np.array_equal(values[ids], scores)):
            return f"row {row} has other logits than the largest"
        if len(set(ids.tolist())) < len(ids):
            return f"row {row} has a token twice"
        below = values.astype(np.float64) - values.max()
        sum_ = np.exp(below * scale[row, 0]).sum()
        if not abs(total - sum_) <= _TOTALS * sum_:
            return f"row {row} has the total {total}, expected {sum_}"
    return None
