"""The keyword arguments that requests and loading take, and what becomes of them.

Each has the name and meaning of a field of ``SamplingParams``, ``SessionConfig``, ``EngineConfig`` or
``ProviderChoice``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict

from llorch_serve.artifact.manifest import KvDtype
from llorch_serve.config import EngineConfig, SessionConfig, StageChoice
from llorch_serve.providers import ProviderChoice
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.structured.spec import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured


class SamplingSettings(TypedDict, total=False):
    """How tokens are chosen and when an answer ends; what is left out is the artifact's recommendation.

    json_schema (a schema as JSON text or a mapping), json_object, regex, choices, grammar: the form that the
        answer is held to; at most one of them.
    The rest: see :class:`llorch_serve.sampling.params.SamplingParams`; ``stop`` may be one text.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    keep_special_tokens: bool
    json_schema: str | Mapping[str, Any]
    json_object: Literal[True]
    regex: str
    choices: Sequence[str]
    grammar: str


FORMS = ("json_schema", "json_object", "regex", "choices", "grammar")


class LoadSettings(TypedDict, total=False):
    """How a model is loaded; what is left out is what ``llorch generate`` takes.

    provider: its name, as ``--provider`` takes it. provider_options: by name. provider_library: of a plugin.
    stage_devices, stage_processes: see :class:`llorch_serve.config.StageChoice`.
    The rest: see :class:`llorch_serve.config.SessionConfig` and :class:`llorch_serve.config.EngineConfig`.
    """

    threads: int
    slots: int
    max_context: int
    kv_cache_bytes: int
    kv_dtype: KvDtype
    single_graph: bool
    batch_invariant: bool
    huge_pages: bool
    share_weights: bool
    provider: str
    provider_options: Mapping[str, str]
    provider_library: str | PathLike[str]
    allow_cpu_nodes: bool
    stage_devices: Sequence[int]
    stage_processes: bool
    prefill_chunk: int
    max_waiting: int
    max_waiting_tokens: int
    prefix_cache: bool
    strict_reuse: bool
    lookup: int
    draft: str | PathLike[str]
    kv_cache: bool
    tool_format: str
    reasoning_format: str


def sampling_params(settings: SamplingSettings) -> SamplingParams:
    """Return what these settings ask for.

    Raises TypeError for a name that is none of them, as any call does, and ValueError for two forms.
    """
    check_names(settings, SamplingSettings)
    given: dict[str, Any] = {name: value for name, value in settings.items() if name not in FORMS}
    stop = given.get("stop", ())
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
    return SamplingParams(**given, structured=_form(settings))


def _form(settings: SamplingSettings) -> Structured | None:
    asked = [name for name in FORMS if settings.get(name) is not None and settings.get(name) is not False]
    if not asked:
        return None
    if len(asked) > 1:
        raise ValueError(f"found {' and '.join(asked)}; an answer is held to one form, so give one of them")
    match asked[0]:
        case "json_schema":
            schema = settings["json_schema"]
            return JsonSchema(schema if isinstance(schema, str) else json.dumps(schema))
        case "json_object":
            return JsonObject()
        case "regex":
            return Regex(settings["regex"])
        case "choices":
            return Choice(tuple(settings["choices"]))
        case _:
            return Grammar(settings["grammar"])


def engine_config(settings: LoadSettings) -> EngineConfig:
    """Return the configuration of a model in this process.

    Raises TypeError for a name that is none of them, and ValueError for a number that is out of range.
    """
    check_names(settings, LoadSettings)
    given: dict[str, Any] = dict(settings)
    least = dict.fromkeys(("threads", "slots", "max_context", "prefill_chunk", "max_waiting_tokens"), 1)
    for name, lowest in {**least, "lookup": 0, "max_waiting": 0, "kv_cache_bytes": 0}.items():
        if given.get(name) is not None and given[name] < lowest:
            raise ValueError(f"{name} is {given[name]}, expected at least {lowest}")
    if given.get("draft") is not None:
        given["draft"] = Path(given["draft"])
    library = given.pop("provider_library", None)
    provider = ProviderChoice(
        given.pop("provider", None),
        tuple(f"{name}={value}" for name, value in given.pop("provider_options", {}).items()),
        None if library is None else Path(library),
        given.pop("allow_cpu_nodes", False),
    )
    stages = StageChoice(tuple(given.pop("stage_devices", ())), given.pop("stage_processes", False))
    ours = {field.name for field in fields(EngineConfig)}
    session = SessionConfig(
        provider=provider, stages=stages, **{name: value for name, value in given.items() if name not in ours}
    )
    return replace(
        EngineConfig(), session=session, **{name: value for name, value in given.items() if name in ours}
    )


def check_names(settings: Mapping[str, Any], known: Any) -> None:
    """Raise TypeError for a name that ``known``, a TypedDict, does not have."""
    for name in settings:
        if name not in known.__annotations__:
            raise TypeError(
                f"{name!r} is no setting; expected one of {', '.join(sorted(known.__annotations__))}"
            )
