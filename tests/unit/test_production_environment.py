"""Every flag of ``llorch serve`` is also a variable; a flag wins. The command itself is replaced by one that
tells what it got.
"""

from __future__ import annotations

import functools

import pytest
import typer.main

from llorch_serve import cli
from llorch_serve.terminal import serve
from support.harness.processes import llorch_here

GROUP = typer.main.get_command(cli.app)
PARAMS = {p.name: p for p in GROUP.get_command(None, "serve").params if p.param_type_name == "option"}

# For each flag what the variable and the flag say, and what the command must then get.
VALUES = {
    "model": ("a", "b"),
    "host": ("127.0.0.2", "127.0.0.3"),
    "port": (1234, 4321),
    "slots": (2, 3),
    "max_context": (64, 65),
    "kv_cache_memory": ("1GiB", "2GiB"),
    "kv_dtype": ("int8", "float32"),
    "single_graph": (True, False),
    "no_prefix_cache": (True, False),
    "strict_reuse": (True, False),
    "prefill_chunk": (128, 512),
    "lookup": (3, 4),
    "draft": ("a", "b"),
    "tool_format": ("a", "b"),
    "reasoning_format": ("a", "b"),
    "threads": (1, 2),
    "provider": ("a", "b"),
    "provider_option": ("a=1", "b=2"),
    "ep_library": ("a", "b"),
    "allow_cpu_nodes": (True, False),
    "max_queued_requests": (5, 6),
    "max_queued_tokens": (7, 8),
    "cache_sharing": ("client", "all"),
    "max_message_bytes": ("1MiB", "2MiB"),
    "stream_interval": ("2", "auto"),
    "token_file": ("a", "b"),
    "tls_cert": ("a", "b"),
    "tls_key": ("a", "b"),
    "verify_signature": ("a", "b"),
    "tls_client_ca": ("a", "b"),
    "require_auth": (True, False),
    "worker_id": ("a", "b"),
    "callback_url": ("http://a", "http://b"),
    "advertise_host": ("a", "b"),
    "model_ref": ("a", "b"),
    "idle_timeout": (1.5, 2.5),
    "drain_timeout": (3.5, 4.5),
    "http": ("1", "2"),
    "allowed_host": ("a", "b"),
    "allowed_origin": ("http://a", "http://b"),
    "unknown_fields": ("ignore", "refuse"),
    "batch_folder": ("a", "b"),
    "batch_quota": ("1MiB", "2MiB"),
    "batch_quota_total": ("3MiB", "4MiB"),
    "batch_files": (5, 6),
    "batch_in_flight": (7, 8),
    "served_model_name": ("a", "b"),
    "rank_format": ("none", "qwen3"),
    "otlp_endpoint": ("http://a", "http://b"),
    "log_format": ("json", "text"),
    "log_level": ("debug", "error"),
    "preload_only": (True, False),
    "batch_invariant": (True, False),
    "huge_pages": (True, False),
    "stage_device": ("0", "1"),
    "stage_processes": (True, False),
    "share_weights": (True, False),
    "cluster": ("a:1", "b:2"),
    "replicas": ("1", "1:2"),
    "resume_streams": (True, False),
}


@pytest.fixture
def got(monkeypatch):
    found = {}

    @functools.wraps(serve.command)
    def command(**arguments):
        found.update(arguments)

    monkeypatch.setattr(serve, "command", command)
    return found


def test_the_table_has_every_flag():
    assert set(VALUES) == set(PARAMS) - {"help"}


def written(value: object) -> str:
    """Return what a flag of that value reads like; of one that may come several times it came once."""
    if isinstance(value, list):
        [value] = value
    return str(getattr(value, "value", value))


@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_flag_reads_its_variable_and_wins(got, name):
    first, second = VALUES[name]
    variable = {f"LLORCH_{name.upper()}": str(first)}
    outcome = llorch_here("serve", "DIR", **variable)
    assert outcome.code == 0, outcome
    assert written(got[name]) == str(first)
    option = PARAMS[name]
    if isinstance(second, bool):
        [off] = option.secondary_opts
        flags = (off,)
    else:
        flags = (option.opts[-1], str(second))
    assert llorch_here("serve", "DIR", *flags, **variable).code == 0
    assert written(got[name]) == str(second)


def test_a_bad_value_of_a_variable_is_a_usage_error(got):
    outcome = llorch_here("serve", "DIR", LLORCH_PORT="http")
    assert outcome.code == 2
    assert "LLORCH_PORT" in outcome.stderr or "--port" in outcome.stderr
    assert got == {}


def test_the_help_names_the_variables():
    outcome = llorch_here("serve", "--help")
    assert outcome.code == 0
    for name in VALUES:
        assert f"LLORCH_{name.upper()}" in "".join(outcome.stdout.replace("│", "").split()), name
