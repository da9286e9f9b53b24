"""``verify --layers --llama-cpp``: llama.cpp on the same F32, F16 and Q8_0 file, in an environment that
ci/test-llamacpp makes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llorch_export.verify.layers.stages import Kind, Measure
from llorch_export.verify.layers.verify import verify_layers
from support.builders.checkpoints import Weights, write_gguf
from support.builders.tiny_exports import export_tiny, silent

pytestmark = [
    pytest.mark.llamacpp,
    pytest.mark.reference,
    # It warns about code of its own that newer Pythons will refuse.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.parametrize(
    ("weight_type", "precision", "measure"),
    [
        ("F32", "fp32", Measure.ABSOLUTE),
        ("F16", "fp32", Measure.KL),
        ("Q8_0", "fp32", Measure.KL),
        ("F32", "int8", Measure.KL),
    ],
)
def test_logits_are_llama_cpps(tmp_path: Path, weight_type: str, precision: str, measure: Measure) -> None:
    source = write_gguf(tmp_path / "model.gguf", weight_type=weight_type)
    export_tiny(source, tmp_path / "out", precision=precision)
    found = verify_layers(tmp_path / "out", str(source), silent, llama_cpp=True)
    assert found.passed, found.first_departing
    (stage,) = (stage for stage in found.stages if stage.kind is Kind.LLAMA_CPP)
    assert (stage.name, stage.measure) == ("logits/llama.cpp", measure)


def test_another_file_departs(tmp_path: Path) -> None:
    def edit(weights: Weights) -> None:
        weights["lm_head.weight"] *= np.float32(1.01)

    export_tiny(write_gguf(tmp_path / "model.gguf"), tmp_path / "out")
    other = write_gguf(tmp_path / "other.gguf", edit=edit)
    found = verify_layers(tmp_path / "out", str(other), silent, llama_cpp=True)
    assert [stage.name for stage in found.stages if not stage.passed] == [
        "logits",
        "logits/llama.cpp",
        "softmax",
    ]
