"""``llorch export`` on tiny models: its documents, its flags, and nothing left behind when it is
interrupted.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from llorch_export.checkpoint.names import expected_tensors
from llorch_export.config.hf import config_from_hf
from support.builders.arch_rows import HF
from support.builders.checkpoints import tiny_config, tiny_tokenizer_json, write_hf_folder
from support.harness.processes import PATIENCE_S, environment, llorch, llorch_here

CONFIGS = Path(__file__).parent.parent / "data" / "configs"


def manifest(folder):
    return json.loads((folder / "llorch.json").read_text())


# Documents and flags.


def test_json_is_one_document_on_stdout(tiny_source, tmp_path):
    outcome = llorch("export", tiny_source, "--output", tmp_path / "a", "--json")
    document = outcome.document()
    written = manifest(tmp_path / "a")
    assert document["output"] == str(tmp_path / "a")
    assert document["changed"] is True
    assert document["fingerprint"] == written["fingerprint"]
    assert document["recipe"] == written["recipe"]
    assert document["bytes"] == sum(entry["bytes"] for entry in written["files"])
    assert document["seconds"] >= 0
    assert outcome.stderr == ""


def test_without_json_stdout_is_empty(tiny_source, tmp_path):
    outcome = llorch_here("export", tiny_source, "--output", tmp_path / "a")
    assert (outcome.code, outcome.stdout) == (0, "")
    assert str(tmp_path / "a") in outcome.stderr


def test_a_shorter_context_than_the_model_has_is_said(tmp_path):
    """LongRoPE turns every position otherwise once a sequence is long; no flag asked for the shorter
    context.
    """
    source = write_hf_folder(tmp_path / "model", HF["phi3, longrope, all short"])
    outcome = llorch_here("export", source, "-o", tmp_path / "a")
    assert (outcome.code, manifest(tmp_path / "a")["context_length"]) == (0, 128)
    assert "note: the context is 128 of the model's 256 positions" in outcome.stderr
    asked = llorch_here("export", source, "-o", tmp_path / "a", "--force", "--max-context", "128")
    assert (asked.code, "note:" in asked.stderr) == (0, False)
    beyond = llorch_here("export", source, "-o", tmp_path / "a", "--force", "--max-context", "200")
    assert beyond.code == 2
    assert "Use --max-context 128 or less" in beyond.stderr


def test_flags_end_up_in_the_manifest(tiny_source, tmp_path):
    flags = ("--precision", "int4", "--block-size", "16", "--head-precision", "int8", "--accuracy-level", "0")
    document = llorch_here(
        "export", tiny_source, "-o", tmp_path / "a", *flags, "--max-context", "100", "--json"
    ).document()
    recipe = document["recipe"]
    assert (recipe["precision"], recipe["block_size"], recipe["head_precision"]) == ("int4", 16, "int8")
    assert recipe["accuracy_level"] == 0
    assert manifest(tmp_path / "a")["context_length"] == 100


def test_int8_is_the_default(tiny):
    assert manifest(tiny)["recipe"]["precision"] == "int8"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--accuracy-level", "1"), "--accuracy-level"),
        (("--block-size", "48"), "--block-size"),
        (("--precision", "fp32", "--block-size", "32"), "--block-size"),
        (("--max-context", "129"), "2 to 128"),
    ],
)
def test_impossible_flags_are_refused(tiny_source, tmp_path, flags, named):
    outcome = llorch_here("export", tiny_source, "-o", tmp_path / "a", *flags)
    assert outcome.code == 2
    assert named in outcome.error()
    assert list(tmp_path.iterdir()) == []


def test_a_precision_that_there_is_not_is_refused_with_what_there_is(tiny_source, tmp_path):
    outcome = llorch_here("export", tiny_source, "-o", tmp_path / "a", "--precision", "fp8")
    assert outcome.code == 2
    assert "'fp8' is not one of 'fp32', 'fp16', 'bf16', 'int8', 'int4'" in outcome.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_output_must_be_named(tiny_source):
    outcome = llorch_here("export", tiny_source)
    assert outcome.code == 2
    assert "--output" in outcome.error()


def test_an_artifact_is_replaced_only_on_request(tiny_source, tmp_path):
    flags = ("export", tiny_source, "-o", tmp_path / "a", "--json")
    first = llorch_here(*flags).document()["fingerprint"]
    refused = llorch_here(*flags, "--precision", "fp32")
    assert (refused.code, "--force" in refused.error()) == (2, True)
    assert manifest(tmp_path / "a")["fingerprint"] == first
    assert llorch_here(*flags, "--precision", "fp32", "--force").document()["fingerprint"] != first
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_if_changed_does_nothing_the_second_time(tiny_source, tmp_path):
    flags = ("export", tiny_source, "-o", tmp_path / "a", "--if-changed")
    assert llorch_here(*flags, "--json").document()["changed"] is True
    before = (tmp_path / "a" / "llorch.json").stat().st_mtime_ns
    assert llorch_here(*flags, "--json").document()["changed"] is False
    assert "up to date" in llorch_here(*flags).stderr
    assert (tmp_path / "a" / "llorch.json").stat().st_mtime_ns == before
    assert llorch_here(*flags, "--json", "--precision", "fp32").document()["changed"] is True


def test_a_model_without_end_of_sequence_says_so(tmp_path):
    source = write_hf_folder(
        tmp_path / "source", {"eos_token_id": None}, tokenizer_config={"eos_token": None}
    )
    outcome = llorch_here("export", source, "-o", tmp_path / "a")
    assert (outcome.code, manifest(tmp_path / "a")["stop_token_ids"]) == (0, [])
    assert "no end-of-sequence token" in outcome.stderr


# Dry runs.


@pytest.mark.parametrize(
    ("name", "parameters", "key_value_rows"),
    [  # parameters as the models' authors count them
        ("llama-2-7b", 6_738_415_616, 4096),
        ("llama-2-13b", 13_015_864_320, 5120),
        ("llama-2-70b", 68_976_648_192, 1024),
        ("llama-3-8b", 8_030_261_248, 1024),
        ("llama-3-70b", 70_553_706_496, 1024),
    ],
)
def test_a_dry_run_needs_no_weights(name, parameters, key_value_rows):
    document = llorch_here("export", CONFIGS / name, "--dry-run", "--json").document()
    shapes = {tensor["name"]: tensor["shape"] for tensor in document["tensors"]}
    hidden = json.loads((CONFIGS / name / "config.json").read_text())["hidden_size"]
    assert document["parameters"] == parameters
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [key_value_rows, hidden]
    assert {
        "config",
        "recipe",
        "context_length",
        "data_bytes",
        "notices",
        "kv_bytes_per_token",
        "inputs",
    } <= document.keys()


def test_a_dry_run_writes_nothing(tiny_source, tmp_path):
    outcome = llorch_here("export", tiny_source, "-o", tmp_path / "a", "--dry-run")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "model.layers.1.mlp.down_proj.weight" in outcome.stdout
    assert "MiB more for prompts; KV cache 128 bytes a token in int8" in outcome.stdout
    assert list(tmp_path.iterdir()) == []


# Interrupted.


@pytest.fixture(scope="module")
def slow_source(tmp_path_factory):
    """A checkpoint of zeros that takes seconds to export and, as a sparse file, next to no disk.

    It is so large that the default recipe measures nothing before it writes.
    """
    folder = tmp_path_factory.mktemp("slow")
    config = tiny_config(
        hidden_size=2048,
        intermediate_size=16_384,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    tensors, offset = {}, 0
    for name, shape in expected_tensors(config_from_hf(config)).items():
        size = 2
        for dimension in shape:
            size *= dimension
        tensors[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + offset)
    return folder


def interrupted(number, *arguments, **variables):
    """Run a command on a terminal, signal it once its progress bar shows that weights are written; return its
    code.
    """
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "llorch_serve", *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=end,
        env=environment(TERM="xterm", **variables),
    )
    os.close(end)
    guard = threading.Timer(PATIENCE_S, process.kill)
    guard.start()
    shown = b""
    try:
        while chunk := _read(terminal):
            shown += chunk
            if number is not None and b"writing weights" in shown:
                process.send_signal(number)
                number = None
        code = process.wait()
    finally:
        guard.cancel()
        os.close(terminal)
    assert number is None, f"ended before it could be interrupted: {shown!r}"
    return code, shown.decode()


def _read(terminal):
    try:
        return os.read(terminal, 2**16)
    except OSError:  # Linux says so when the last writer has closed the terminal
        return b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing_behind(slow_source, tmp_path, number):
    code, shown = interrupted(
        number, "export", slow_source, "--precision", "int8", "--output", tmp_path / "a"
    )
    assert code == 130
    assert "interrupted" in shown
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_export_leaves_the_artifact_that_was_there(slow_source, tiny_source, tmp_path):
    assert llorch_here("export", tiny_source, "-o", tmp_path / "a").code == 0
    before = (tmp_path / "a" / "llorch.json").read_bytes()
    code, _ = interrupted(
        signal.SIGINT, "export", slow_source, "--precision", "int8", "--output", tmp_path / "a", "--force"
    )
    assert code == 130
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a" / "llorch.json").read_bytes() == before


def test_an_interrupted_export_into_the_cache_leaves_nothing_behind(slow_source, tmp_path):
    # The signal goes to this process alone, as from a service manager; its exporter must not outlive it.
    code, _ = interrupted(signal.SIGINT, "generate", slow_source, "--prompt", "a", LLORCH_CACHE=tmp_path)
    assert code == 130
    assert list(tmp_path.iterdir()) == []
