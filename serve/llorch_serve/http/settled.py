"""Answers without what depends on when they were made, and beside what: the same line of a batch has the same
bytes whenever it is answered.

Input: the JSON of an answer. Output: the same without durations, tokens that were cached and tokens that were
guessed; and the usage, which a batch counts.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from llorch_serve.batch.answering import Usage
from llorch_serve.files.json_errors import NOT_JSON

_UNSETTLED: Final = {
    "prompt_tokens_details": ("cached_tokens",),
    "input_tokens_details": ("cached_tokens", "cache_write_tokens"),
    "completion_tokens_details": ("accepted_prediction_tokens", "rejected_prediction_tokens"),
}
"""What is left out of a usage, by the part of it that it is in; a part that is left empty goes too."""

_CACHED: Final = b'"cached_tokens"'

_Fields = dict[str, msgspec.Raw]

_split = msgspec.json.Decoder(_Fields).decode
_split_list = msgspec.json.Decoder(list[_Fields]).decode
_read = msgspec.json.Decoder(dict[str, Any]).decode


def settled(body: bytes) -> tuple[bytes, Usage]:
    """Return an answer without what varies, and its usage. What is not of this form stays as it is."""
    try:
        document = _split(body)
        usage = _settle_usage(document)
        _drop_timings(document)
        if "choices" in document:
            choices = _split_list(document["choices"])
            for choice in choices:
                _drop_timings(choice)
            document["choices"] = _raw(choices)
        if "data" in document and _CACHED in body:  # of scores; vectors may be millions of numbers
            scores = _split_list(document["data"])
            document["data"] = _raw([_without_cached(score) for score in scores])
    except NOT_JSON:
        return body, Usage()
    return msgspec.json.encode(document), usage


def _settle_usage(document: _Fields) -> Usage:
    if "usage" not in document:
        return Usage()
    usage = _read(document["usage"])
    cached = 0
    for part, names in _UNSETTLED.items():
        details = usage.get(part)
        if not isinstance(details, dict):
            continue
        cached += details.get("cached_tokens", 0)
        usage[part] = {name: value for name, value in details.items() if name not in names}
        if not usage[part]:
            del usage[part]
    document["usage"] = _raw(usage)
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    return Usage(prompt, usage.get("completion_tokens", usage.get("output_tokens", 0)), cached)


def _without_cached(score: _Fields) -> _Fields:
    return {name: value for name, value in score.items() if name != "cached_tokens"}


def _drop_timings(part: _Fields) -> None:
    if "llorch" in part:
        told = _read(part["llorch"])
        told.pop("timings", None)
        part["llorch"] = _raw(told)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
