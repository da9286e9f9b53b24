"""The most likely token of each row as a graph, so that it is found where the logits are.

The graph is made here, of a few operators of ONNX's own, and tried on a provider before it is relied upon.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llorch_serve.errors import ProviderError
from llorch_serve.providers import ActiveProvider
from llorch_serve.runtime.recordings import run_options
from llorch_serve.runtime.small_graph import FLOAT32, INT64, SmallGraph, open_small

MOST_TOKENS: Final = 2**24 - 2
"""The largest vocabulary: the graph counts in float32, which is exact up to 2**24."""


def greedy_model(vocab_size: int) -> bytes:
    """Return an ONNX model: ``logits`` float32 [rows, vocab_size] to ``ids`` int64 [rows].

    An id is the first of the largest logits, as numpy's argmax has it, or -1 in a row with a logit that is
    not finite. ArgMax and TopK are not used: which of equal logits they give is up to a provider. The place
    of the first one is the largest of vocab_size - place among those that equal the maximum. A row's sum of
    logits times 0 is 0, or not a number where one is not finite.
    """
    assert 0 < vocab_size <= MOST_TOKENS
    graph = SmallGraph("greedy")
    for name, value in (
        ("places", np.arange(vocab_size, 0, -1, dtype=np.float32)),
        ("zero", np.zeros((), np.float32)),
        ("one", np.ones((), np.float32)),
        ("behind", np.array(vocab_size + 1, np.float32)),
        ("last_axis", np.array([-1], np.int64)),
    ):
        graph.constant(name, value)
    for output, operator, inputs, attributes in (
        ("best", "ReduceMax", ("logits", "last_axis"), {"keepdims": 1}),
        ("equals", "Equal", ("logits", "best"), {}),
        ("marks", "Cast", ("equals",), {"to": FLOAT32}),
        ("marked", "Mul", ("marks", "places"), {}),
        ("first", "ReduceMax", ("marked", "last_axis"), {"keepdims": 0}),
        ("nothing", "Mul", ("logits", "zero"), {}),
        ("sum", "ReduceSum", ("nothing", "last_axis"), {"keepdims": 0}),
        ("finite", "Equal", ("sum", "zero"), {}),
        ("sound", "Cast", ("finite",), {"to": FLOAT32}),
        ("next", "Sub", ("behind", "first"), {}),
        ("next_or_zero", "Mul", ("next", "sound"), {}),
        ("place", "Sub", ("next_or_zero", "one"), {}),
        ("ids", "Cast", ("place",), {"to": INT64}),
    ):
        graph.node(operator, inputs, (output,), **attributes)
    graph.takes("logits", FLOAT32, (None, vocab_size))
    graph.gives("ids", INT64, (None,))
    return graph.serialised()


def greedy_session(runtime: Any, provider: ActiveProvider, vocab_size: int) -> Any:
    """Load the graph on a provider and try it; return onnxruntime's session.

    Raises ProviderError if the provider does not run all of it, or gives other ids than numpy.
    """
    logits = trial_logits(vocab_size)
    with open_small(runtime, provider, greedy_model(vocab_size), "does not choose tokens") as session:
        (found,) = session.run(["ids"], {"logits": logits}, run_options(runtime, provider))
    expected = greedy_ids(logits)
    if not np.array_equal(found, expected):
        raise ProviderError(
            f"{provider.runtime_name} gives the ids {found.tolist()} for logits whose largest are at "
            f"{expected.tolist()}"
        )
    return session


def greedy_ids(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """Return what the graph gives, by numpy. logits: [rows, vocabulary]."""
    found: npt.NDArray[np.int64] = logits.argmax(axis=1).astype(np.int64)
    found[~np.isfinite(logits).all(axis=1)] = -1
    return found


def trial_logits(vocab_size: int) -> npt.NDArray[np.float32]:
    """Return rows in which a provider could go wrong: equal logits, zeros of both signs, values that are not
    finite.
    """
    logits = np.random.default_rng(1).standard_normal((9, vocab_size)).astype(np.float32)
    last, middle = vocab_size - 1, vocab_size // 2
    logits[1, [middle, last]] = 9  # equal, far apart
    logits[2] = -3  # all equal
    logits[3] = -1
    logits[3, middle], logits[3, last] = -0.0, 0.0
    logits[4, last] = 7
    logits[5, 0] = np.nan
    logits[6, middle] = np.inf
    logits[7, last] = -np.inf
    logits[8] = np.finfo(np.float32).min
    return logits
