"""What the two processes of a benchmark say to each other has a version, and so has the report: neither
changes its fields without the other end being told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llorch_serve.bench import protocol, schema
from llorch_serve.config import SessionConfig, StageChoice
from llorch_serve.providers import ProviderChoice

_SETTINGS = (
    "prefill_chunk threads slots max_context kv_dtype single_graph batch_invariant huge_pages share_weights "
    "provider options library allow_cpu_nodes stage_devices stage_processes"
)
PROTOCOL_4 = {
    "Settings": _SETTINGS,
    "Open": "label folder tokenizer settings prompt_ids longest",
    "Run": "test",
    "Close": "",
    "Judge": "reference",
    "Ready": "protocol version",
    "Opened": "entry",
    "Ran": "values",
    "Closed": "peak_rss_mib",
    "Judged": "fidelity",
    "Failed": "problem goes_on",
}
"""Every message's fields. To change them, raise PROTOCOL and give this table its new number."""

REPORT_2 = {
    "Figure": "unit better median low high values",
    "OfflineTest": "work prompt_tokens generated_tokens depth streams",
    "ServingTest": "arrivals prompt_tokens generated_tokens spread dataset concurrency rate_per_s burstiness "
    "seed requests duration_s limits_ms http",
    "Problem": "exit_code message",
    "Failure": "status requests after_first_token tokens example",
    "Row": "test figures failures problem",
    "Share": "provider node_share weight_share",
    "Model": "model_id fingerprint kind precision head_precision target block_size rules compute_type "
    "kv_dtype folder_bytes context_length slots limits",
    "FidelityResult": "kl top1 max_abs tokens text oracle limit passed same_source prefill_kl decode_kl",
    "Energy": "sources absent",
    "Entry": "label provider software model placement threads load_s peak_rss_mib energy fidelity rows "
    "problem",
    "Host": "system cpu cpu_features cpus cpus_allowed memory_bytes gpus",
    "Report": "schema_version version created host repeat entries",
}
"""The same of the document, by SCHEMA_VERSION. The entry crosses between the processes too."""


def fields_of(module: Any) -> dict[str, str]:
    kinds = {
        name: kind
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    }
    return {
        name: " ".join(kind.__struct_fields__) for name, kind in kinds.items() if not name.startswith("_")
    }


def test_other_fields_have_another_number() -> None:
    assert (protocol.PROTOCOL, fields_of(protocol)) == (4, PROTOCOL_4)
    assert (schema.SCHEMA_VERSION, fields_of(schema)) == (2, REPORT_2)


def test_the_published_schema_has_the_same_number_and_fields() -> None:
    file = Path(__file__).parents[2] / "artifacts" / "bench.schema.json"
    kinds = json.loads(file.read_text(encoding="utf-8"))["$defs"]
    assert kinds["Report"]["properties"]["schema_version"]["enum"] == [schema.SCHEMA_VERSION]
    expected = {name: {*fields.split()} for name, fields in REPORT_2.items()}
    for test in ("OfflineTest", "ServingTest"):
        expected[test].add("kind")
    assert {name: {*kind["properties"]} for name, kind in kinds.items()} == expected


def test_settings_survive_the_pipe() -> None:
    config = SessionConfig(
        threads=3,
        slots=2,
        max_context=64,
        kv_dtype="int8",
        single_graph=True,
        batch_invariant=True,
        huge_pages=False,
        share_weights=True,
        provider=ProviderChoice("cuda", ("a=1",), Path("/lib.so"), True),
        stages=StageChoice((0, 1), True),
    )
    line = msgspec.json.encode(protocol.Settings.of(config))
    assert msgspec.json.decode(line, type=protocol.Settings).config().session == config


def test_settings_with_other_fields_are_refused_by_the_field() -> None:
    now = msgspec.to_builtins(protocol.Settings.of(SessionConfig()))
    for other, field in (({**now, "later": True}, "later"), (without(now, "share_weights"), "share_weights")):
        with pytest.raises(msgspec.ValidationError, match=field):
            msgspec.convert(other, type=protocol.Settings)


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}
