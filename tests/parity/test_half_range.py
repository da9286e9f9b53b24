"""Activations beyond float16: export refuses them, and what its prompt does not reach never becomes a
token.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.options import ExportOptions
from llorch_export.pipeline import ExportResult, export
from llorch_export.verify import float_range as probe
from llorch_export.verify.float_range import probe_activations
from llorch_serve.errors import ArtifactError, ProviderError
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids, silent
from support.oracles.half_precision import write_folder_with_a_bad_token, write_swollen_folder
from tolerances import FP16_LOGITS

BAD_TOKEN = 511
FACTOR = 2e4  # brings the residual stream beyond 7e4


def export_fp16(source: Path, output: Path, **options: Any) -> ExportResult:
    return export(ExportOptions(str(source), output, **{"precision": "fp16", **options}), silent)


@pytest.mark.parametrize(
    "options", [{}, {"precision": "int8", "compute_type": "float16"}], ids=["fp16", "int8 in float16"]
)
def test_a_residual_stream_beyond_float16_is_refused_and_the_first_value_named(
    tmp_path: Path, options: Any
) -> None:
    """Weights that fit, whose sums do not: only running the graph shows it."""
    source = write_swollen_folder(tmp_path / "source", FACTOR)
    with pytest.raises(ArtifactError) as caught:
        export_fp16(source, tmp_path / "out", **options)
    message = str(caught.value)
    assert re.match(
        r"model\.layers\.[01]\.\w+layernorm/residual: \d+ of 4096 values are not finite in float16", message
    )
    assert "whose largest is 65504" in message
    assert "--precision bf16 or fp32" in message
    assert "--compute-type bfloat16 or float32" in message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_same_checkpoint_is_right_in_fp32_and_exports_in_bf16(tmp_path: Path) -> None:
    source, plain = write_swollen_folder(tmp_path / "source", FACTOR), write_hf_folder(tmp_path / "plain")
    ids = random_ids(40)
    swollen = open_tiny(export_tiny(source, tmp_path / "out")).prefill(0, ids, 0, range(40))
    usual = open_tiny(export_tiny(plain, tmp_path / "usual")).prefill(0, ids, 0, range(40))
    np.testing.assert_allclose(swollen, usual, atol=FP16_LOGITS, rtol=0)
    assert export_fp16(source, tmp_path / "bf16", precision="bf16").notices == ()


def test_little_room_is_said_and_enough_is_not(tmp_path: Path) -> None:
    (notice,) = export_fp16(write_swollen_folder(tmp_path / "near", 1e4), tmp_path / "out").notices
    assert "of the 65,504 that float16 holds" in notice
    assert export_fp16(write_hf_folder(tmp_path / "plain"), tmp_path / "usual").notices == ()


def test_a_probe_that_cannot_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = export_fp16(write_hf_folder(tmp_path / "source"), tmp_path / "out").artifact

    def refuse(*_: object, **__: object) -> None:
        raise ProviderError("onnxruntime cannot be imported")

    with monkeypatch.context() as patch:
        patch.setattr(probe, "run_observed", refuse)
        notice = probe_activations(artifact)
        assert notice is not None
        assert "onnxruntime cannot be imported" in notice
        patch.setattr(probe, "_MEMORY_FACTOR", 10**6)
        notice = probe_activations(artifact)
        assert notice is not None
        assert "GiB of free memory" in notice


def test_a_sequence_that_overflows_leaves_its_neighbour_and_its_successor_alone(tmp_path: Path) -> None:
    source = write_folder_with_a_bad_token(tmp_path / "source", BAD_TOKEN)
    artifact = export_fp16(source, tmp_path / "out").artifact
    good, session = [5, 9, 300, 17], open_tiny(artifact)
    alone = [session.prefill(0, good, 0)[0].copy(), session.decode([7], [5])[0].copy()]
    assert np.isfinite(alone).all()
    session.prefill(0, good, 0)
    assert not np.isfinite(session.prefill(1, [5, BAD_TOKEN], 0)).all()
    pair = session.decode([7, 8], [5, 3])
    np.testing.assert_array_equal(pair[0], alone[1])
    assert not np.isfinite(pair[1]).all()
    # Its slot's keys and values hold NaN, behind those of the next sequence there.
    session.prefill(1, [BAD_TOKEN] * 9, 0)
    session.copy_slot(1, 0, 9)
    for slot in (0, 1):
        np.testing.assert_array_equal(session.prefill(slot, good, 0)[0], alone[0])
    np.testing.assert_array_equal(session.decode([7, 7], [5, 5]), [alone[1]] * 2)


def test_the_bad_token_is_one_only_in_float16(tmp_path: Path) -> None:
    """Guards the test above: the model itself is sound."""
    source = write_folder_with_a_bad_token(tmp_path / "source", BAD_TOKEN)
    assert np.isfinite(open_tiny(export_tiny(source, tmp_path / "out")).prefill(0, [5, BAD_TOKEN], 0)).all()
