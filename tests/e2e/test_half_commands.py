"""Half precision at the front door: artifacts that run, those that cannot, and answers that end instead of
lying.
"""

from __future__ import annotations

import threading

import grpc
import numpy as np
import pytest

from llorch_serve.rpc import worker_pb2 as pb
from support.harness.processes import PATIENCE_S, llorch, llorch_here, serving
from support.harness.rpc import open_stub
from support.oracles.half_precision import write_folder_with_a_bad_token, write_swollen_folder

BAD_TOKEN = 511


@pytest.fixture(scope="module")
def bf16(tmp_path_factory, tiny_source, export_here):
    return export_here(tiny_source, tmp_path_factory.mktemp("bf16") / "artifact", "--precision", "bf16")


def test_an_fp16_artifact_generates_verifies_and_is_inspected(tiny_source, tmp_path, export_here):
    folder = export_here(tiny_source, tmp_path / "artifact", "--precision", "fp16")
    outcome = llorch_here("generate", folder, "--prompt-ids", "5,9,300", "--max-tokens", "4", "--json")
    assert len(outcome.document()["token_ids"]) == 4
    found = llorch_here("inspect", folder, "--json").document()
    assert found["recipe"]["compute_type"] == "float16"
    assert found["kv_bytes_per_token"] == 256
    text = llorch_here("inspect", folder).stdout
    assert "compute_type float16" in text
    sizes = found["graph"]["weight_bytes"]
    assert sizes["embedding and head"] == 2 * 2 * 512 * 64


@pytest.mark.reference
def test_fp16_is_verified_whole_and_layer_by_layer(tiny_source, tmp_path, export_here):
    folder = export_here(tiny_source, tmp_path / "artifact", "--precision", "fp16")
    whole = llorch_here("verify", folder, "--against", tiny_source, "--json").document()
    assert whole["passed"]
    assert 0 < whole["kl"] < whole["limit"] == 1e-4
    layers = llorch_here("verify", folder, "--against", tiny_source, "--layers", "--json").document()
    assert layers["passed"]
    assert {stage["limit"] for stage in layers["stages"] if stage["measure"] == "relative"} == {0.02}
    # A weight that is a twentieth off departs from float16's tolerance, and from no other precision's.
    data = np.memmap(folder / "model.onnx.data", np.float16, "r+")
    data *= np.float16(1.05)
    data.flush()
    damaged = llorch_here("verify", folder, "--against", tiny_source, "--layers", "--json")
    assert damaged.code == 1


@pytest.mark.parametrize(
    "command", [("generate", "--prompt", "a"), ("bench", "--max-tokens", "2"), ("serve", "--port", "0")]
)
def test_a_bf16_artifact_on_the_cpu_is_refused_with_the_alternatives(bf16, command):
    name, *flags = command
    outcome = llorch(name, bf16, *flags)
    assert outcome.code == 4
    last = outcome.stderr.splitlines()[-1]
    assert "CPUExecutionProvider has no bfloat16 arithmetic" in last
    assert "--precision fp32 or --precision fp16" in last
    assert "CUDAExecutionProvider" in last


@pytest.mark.reference
@pytest.mark.parametrize("flags", [(), ("--layers",)])
def test_a_bf16_artifact_cannot_be_verified_here(bf16, tiny_source, flags):
    outcome = llorch_here("verify", bf16, "--against", tiny_source, *flags)
    assert outcome.code == 4
    assert "no bfloat16 arithmetic" in outcome.error()


def test_a_bf16_artifact_is_inspected_all_the_same(bf16):
    found = llorch_here("inspect", bf16, "--json").document()
    assert found["recipe"]["compute_type"] == "bfloat16"


def test_an_export_that_overflows_leaves_one_line_and_nothing_else(tmp_path):
    source = write_swollen_folder(tmp_path / "source", 2e4)
    outcome = llorch_here(
        "export", source, "--output", tmp_path / "artifact", "--precision", "fp16", "--json"
    )
    assert outcome.code == 3
    assert "not finite in float16" in outcome.error()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_notice_stands_on_stderr_and_in_the_document(tmp_path):
    source = write_swollen_folder(tmp_path / "source", 1e4)
    flags = ("--output", tmp_path / "artifact", "--precision", "fp16", "--json")
    outcome = llorch_here("export", source, *flags)
    (notice,) = outcome.document()["notices"]
    assert f"note: {notice}" in outcome.stderr


def test_a_request_that_overflows_ends_with_internal_and_its_neighbours_go_on(tmp_path, export_here):
    source = write_folder_with_a_bad_token(tmp_path / "source", BAD_TOKEN)
    folder = export_here(source, tmp_path / "artifact", "--precision", "fp16")
    good, bad = (
        pb.GenerateRequest(
            input=pb.Input(tokens=pb.TokenInput(ids=ids)),
            sampling=pb.Sampling(temperature=0, ignore_eos=True, max_tokens=count),
        )
        for ids, count in (([5, 9, 300, 17], 60), ([5, BAD_TOKEN], 4))
    )
    with serving(folder) as worker, open_stub(worker.address) as stub:
        alone = list(stub.Generate(good, timeout=PATIENCE_S).choices[0].token_ids)
        neighbour: list[int] = []
        thread = threading.Thread(
            target=lambda: neighbour.extend(stub.Generate(good, timeout=PATIENCE_S).choices[0].token_ids)
        )
        thread.start()
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Generate(bad, timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "logits of 512 that are not finite" in caught.value.details()
        thread.join(PATIENCE_S)
        assert neighbour == alone
        assert "are not finite" in " ".join(worker.command.log)
        assert list(stub.Generate(good, timeout=PATIENCE_S).choices[0].token_ids) == alone
