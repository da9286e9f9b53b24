"""Settings with which an answer is the same bits whatever runs beside it and ran before it.

Input: settings, and the folder that they are for. Output: the same settings, with what docs/determinism.md
names for that model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from llorch_serve.artifact.folder import Artifact
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.loading.models import load_model
from llorch_serve.providers.table import CPU, find_provider
from llorch_serve.runtime.graph_choice import choose_graphs
from llorch_serve.runtime.row_pairs import takes_pairs


def repeatable(config: EngineConfig, folder: Path) -> EngineConfig:
    """Return settings for bits that repeat, as far as the model can give them; what was asked for stays.

    Of earlier requests only what prefill computed is reused, from a cache that does not round it; where a
    cache in int8 was asked for, nothing is. Raises what reading the folder raises, and UsageError.
    """
    model = load_model(folder)
    if not isinstance(model, Artifact) or model.manifest.embeds or model.manifest.fixed_shapes:
        return config
    if model.manifest.layout != "llorch":
        return config
    config = _without_rounded_reuse(config, model)
    pairs = _needs_pairs(config.session, model) and config.guesses is None
    return replace(
        config,
        session=replace(config.session, batch_invariant=config.session.batch_invariant or pairs),
    )


def _without_rounded_reuse(config: EngineConfig, model: Artifact) -> EngineConfig:
    if not config.prefix_cache or not config.kv_cache:
        return config
    if config.session.kv_dtype == "int8":
        return replace(config, prefix_cache=False, strict_reuse=False)
    exact = replace(config.session, kv_dtype=model.manifest.kv.dtype)
    return replace(config, session=exact, strict_reuse=True)


def _needs_pairs(session: SessionConfig, model: Artifact) -> bool:
    """Tell whether some weights are multiplied by rows in pairs, and would be by even numbers of rows."""
    name = session.provider.name
    on_cpu = session.provider.library is None if name is None else find_provider(name).runtime_name == CPU
    recipes = choose_graphs(model.manifest, session).recipes
    return on_cpu and not model.manifest.model.experts and any(map(takes_pairs, recipes))
