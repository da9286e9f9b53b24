"""What goes wrong for people: one line that says what to do, the right code, nothing left behind, the worker
alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess

import grpc
import numpy as np
import pytest
from safetensors.numpy import save_file

from llorch_serve.rpc import worker_pb2 as pb
from support.builders.adapters import write_adapter
from support.builders.checkpoints import tiny_llama_config, write_gguf, write_hf_folder
from support.harness.processes import PATIENCE_S, llorch, llorch_here
from support.harness.rpc import open_stub


def listing(folder):
    """Everything below a folder, with sizes."""
    return sorted((str(path.relative_to(folder)), path.stat().st_size) for path in folder.rglob("*"))


def refused_export(source, folder, code):
    """Export to ``folder``/artifact; return the error after checking its code and that nothing is left
    behind.
    """
    before = listing(folder)
    outcome = llorch_here("export", source, "--output", folder / "artifact", "--json")
    assert outcome.code == code, outcome
    assert listing(folder) == before
    return outcome.error()


def answers(worker):
    outcome = llorch_here(
        "generate", "--connect", worker.address, "--prompt", "a", "--max-tokens", "3", "--json"
    )
    return len(outcome.document()["token_ids"]) == 3


# Export.


def test_a_missing_tokenizer(tmp_path):
    source = write_hf_folder(tmp_path / "source", tokenizer=False)
    error = refused_export(source, tmp_path, 3)
    assert "tokenizer.json" in error
    gguf = write_gguf(tmp_path / "model.gguf", tokenizer=False)
    assert "tokenizer.ggml" in refused_export(gguf, tmp_path, 3)


def test_shards_that_are_missing_or_cut_never_become_garbage_or_zeros(tmp_path):
    source = write_hf_folder(tmp_path / "source", shards=3)
    stray = source / "model.safetensors"  # transformers reads it and not the shards
    save_file({"nonsense": np.zeros(3, np.float32)}, stray)
    assert f"remove {stray.name} if the shards are meant" in refused_export(source, tmp_path, 3)
    stray.unlink()
    whole = llorch_here("export", source, "--output", tmp_path / "whole")
    assert whole.code == 0, whole
    shutil.rmtree(tmp_path / "whole")
    second, third = (source / f"model-0000{n}-of-00003.safetensors" for n in (2, 3))
    os.truncate(third, third.stat().st_size - 1024)
    assert str(third) in refused_export(source, tmp_path, 3)
    second.unlink()
    assert second.name in refused_export(source, tmp_path, 3)


def test_an_adapter_that_lacks_what_its_config_names(tmp_path):
    source = write_hf_folder(tmp_path / "source")
    write_adapter(tmp_path / "lora", tiny_llama_config(), use_dora=True)
    before = listing(tmp_path)
    outcome = llorch_here(
        "export", source, "--output", tmp_path / "artifact", "--lora", tmp_path / "lora", "--json"
    )
    assert outcome.code == 3
    assert "use_dora" in outcome.error()
    assert listing(tmp_path) == before


def test_truncated_weights(tmp_path):
    files = (write_hf_folder(tmp_path / "source") / "model.safetensors", write_gguf(tmp_path / "model.gguf"))
    for file, source in zip(files, (tmp_path / "source", tmp_path / "model.gguf"), strict=True):
        for cut in (1, 1000):  # the second cuts whole tensors off, or a header in two
            os.truncate(file, file.stat().st_size - cut)
            error = refused_export(source, tmp_path, 3)
            assert str(file) in error
            assert "fetch it again" in error


def test_a_missing_shard(tmp_path):
    source = write_hf_folder(tmp_path / "source", shards=3)
    (source / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refused_export(source, tmp_path, 3)


def test_an_unknown_architecture(tmp_path):
    source = write_hf_folder(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    changed = config | {"architectures": ["DbrxForCausalLM"], "model_type": "dbrx"}
    (source / "config.json").write_text(json.dumps(changed))
    error = refused_export(source, tmp_path, 3)
    assert "dbrx" in error
    assert "lama" in error  # what is supported
    gguf = write_gguf(tmp_path / "model.gguf")
    data = gguf.read_bytes()
    assert data.count(b"\x05\0\0\0\0\0\0\0llama") == 1  # the value of general.architecture
    gguf.write_bytes(data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0qwen2"))
    assert "qwen2" in refused_export(gguf, tmp_path, 3)


@contextlib.contextmanager
def small_disk(folder, options):
    """Mount a disk of a given size at ``folder``; skips the test where that is not allowed."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a small disk is not allowed here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(tiny_source, tmp_path):
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        error = refused_export(tiny_source, disk, 6)
    assert "2 MiB free" in error
    assert "--output" in error


def test_a_disk_that_fills_up_during_the_export(tiny_source, tmp_path):
    # Room enough in bytes, but for three entries only: the disk itself, the temporary folder and one file in
    # it.
    with small_disk(tmp_path / "disk", "size=64m,nr_inodes=3") as disk:
        error = refused_export(tiny_source, disk, 6)
        assert "is full" in error
        assert "--output" in error


def test_a_full_cache(tiny_source, tmp_path):
    with small_disk(tmp_path / "disk", "size=2m") as disk:
        outcome = llorch("generate", tiny_source, "--prompt", "a", LLORCH_CACHE=disk)
        assert outcome.code == 6
        assert outcome.stdout == ""
        assert outcome.stderr.splitlines()[-1].startswith("error: ")
        assert listing(disk) == []


# Serving.


@pytest.mark.parametrize("damage", ["tokenizer", "weights", "graph", "manifest"])
@pytest.mark.parametrize(
    "command", [("generate", "--prompt", "a"), ("serve", "--port", "0")], ids=lambda c: c[0]
)
def test_a_damaged_artifact(tiny, tmp_path, damage, command):
    folder = shutil.copytree(tiny, tmp_path / "artifact")
    listed = json.loads((folder / "llorch.json").read_text())
    name = {"tokenizer": listed["tokenizer"], "graph": listed["graph"], "manifest": "llorch.json"}.get(damage)
    path = folder / (name or next(e["path"] for e in listed["files"] if e["path"].endswith(("data", "bin"))))
    if damage == "tokenizer":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 2)
    outcome = llorch(*command, folder)
    assert (outcome.code, outcome.stdout) == (3, "")
    line = outcome.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert path.name in line
    assert "Traceback" not in outcome.stderr


def test_a_manifest_of_the_future(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "artifact")
    data = json.loads((folder / "llorch.json").read_text()) | {"schema_version": 3, "invented": True}
    (folder / "llorch.json").write_text(json.dumps(data))
    outcome = llorch_here("generate", folder, "--prompt", "a")
    assert outcome.code == 3
    assert "schema version 3" in outcome.error()
    assert "pip install -U llorch" in outcome.error()


def test_a_port_in_use(tiny, tiny_worker):
    outcome = llorch("serve", tiny, "--port", tiny_worker.port)
    assert outcome.code == 5
    assert tiny_worker.address in outcome.error()
    assert "--port" in outcome.error()
    assert answers(tiny_worker)


def test_a_port_that_something_else_uses(tiny):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = llorch("serve", tiny, "--port", port)
    assert outcome.code == 5
    assert port in outcome.error()


# One more than the tiny model takes.
PROMPT_129 = pb.Input(tokens=pb.TokenInput(ids=[5] * 129))


def test_a_prompt_longer_than_the_context(tiny, tiny_worker):
    ids = ",".join(["5"] * 129)
    for where in ((tiny,), ("--connect", tiny_worker.address)):
        outcome = llorch_here("generate", *where, "--prompt-ids", ids)
        assert outcome.code == 2
        assert "129" in outcome.error()
        assert "128" in outcome.error()
    with open_stub(tiny_worker.address) as stub:
        request = pb.GenerateRequest(input=PROMPT_129)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(request, timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "129" in caught.value.details()
    assert "128" in caught.value.details()
    assert answers(tiny_worker)


def test_an_answer_that_fills_the_context_ends_with_length(tiny_worker):
    flags = ("--prompt-ids", ",".join(["5"] * 120), "--max-tokens", "64", "--ignore-eos", "--json")
    document = llorch_here("generate", "--connect", tiny_worker.address, *flags).document()
    assert (len(document["token_ids"]), document["finish_reason"]) == (8, "length")


def test_a_bad_request_names_every_field_and_harms_nobody(tiny_worker):
    with open_stub(tiny_worker.address) as stub:
        sampling = pb.Sampling(temperature=float("nan"), top_p=0, stop=[""])
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(pb.GenerateRequest(input=pb.Input(text="a"), sampling=sampling), timeout=PATIENCE_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert all(name in caught.value.details() for name in ("temperature", "top_p", "stop[0]"))
    assert answers(tiny_worker)
