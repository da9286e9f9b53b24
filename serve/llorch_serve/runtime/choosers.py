"""What finds tokens among logits that lie on a device, tried before it is relied upon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llorch_serve.artifact.manifest import LlamaConfig
from llorch_serve.errors import ProviderError
from llorch_serve.providers import ActiveProvider
from llorch_serve.runtime.greedy_graph import greedy_session
from llorch_serve.runtime.leading_graph import leading_session


@dataclass(frozen=True, slots=True)
class Choosers:
    """onnxruntime's sessions, as :func:`.greedy_graph.greedy_session` and
    :func:`.leading_graph.leading_session` give them; None: the host does that.
    """

    greedy: Any = None
    leading: Any = None


NONE: Final = Choosers()
FEWEST_TOKENS: Final = 4096
"""Smaller vocabularies are copied whole."""


def open_choosers(
    runtime: Any, provider: ActiveProvider, model: LlamaConfig, *, on_device: bool
) -> tuple[Choosers, str | None]:
    """Return what works on a provider, and a notice of what does not. on_device: its logits lie there."""
    if not on_device:
        return NONE, None
    vocab_size = model.vocab_size
    try:
        greedy = greedy_session(runtime, provider, vocab_size)
    except ProviderError as error:
        return NONE, f"tokens are chosen on the host: {error}"
    if vocab_size < FEWEST_TOKENS:
        return Choosers(greedy), None
    try:
        return Choosers(greedy, leading_session(runtime, provider, vocab_size)), None
    except ProviderError as error:
        return Choosers(greedy), f"tokens are drawn on the host: {error}"
