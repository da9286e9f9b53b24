"""A runtime's refusal is explained by versions where it is about versions, and only there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from llorch_serve.providers.graph_versions import newer_than_runtime

RUNTIME = SimpleNamespace(__version__="1.2.3")
FORMAT = "Load model failed: Unsupported model IR version: 99, max supported IR version: 13"
OPSET = "Opset 99 is under development. Current official support for domain ai.onnx is till opset 26."


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            FORMAT,
            "has a newer IR version, and onnxruntime 1.2.3 goes up to 13; upgrade the runtime with: pip",
        ),
        (OPSET, "has a newer opset of ai.onnx, and onnxruntime 1.2.3 goes up to 26; upgrade"),
    ],
)
@pytest.mark.parametrize("data", [b"", b"\xff" * 64, None])
def test_a_graph_that_cannot_be_read_is_told_without_its_version(
    tmp_path: Path, message: str, said: str, data: bytes | None
) -> None:
    path = tmp_path / "model.onnx"
    if data is not None:
        path.write_bytes(data)
    found = newer_than_runtime(path, message, RUNTIME)
    assert found is not None
    assert said in found


def test_other_refusals_are_left_alone(tmp_path: Path) -> None:
    assert newer_than_runtime(tmp_path / "model.onnx", "Protobuf parsing failed.", RUNTIME) is None
