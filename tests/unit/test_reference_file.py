"""A reference file: what is written is read back, divergence is right, and nothing but a whole file is
believed.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.engine.capabilities import FULL
from llorch_serve.errors import ArtifactError, ResourceError
from llorch_serve.fidelity.divergence import DivergenceSum, log_softmax
from llorch_serve.fidelity.reference_file import (
    ROUNDING,
    ReferenceFile,
    check_reference,
    divergence,
    read_reference,
    text_hash,
    write_reference,
)
from support.builders.checkpoints import write_hf_folder
from support.builders.reference_files import header_for, own_reference
from support.builders.tiny_artifact import tiny_manifest, write_tiny_artifact
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids

VOCAB = 512


class Model:
    """A session that answers with given logits, and notes what it was asked."""

    def __init__(self, artifact: Artifact, logits: np.ndarray) -> None:
        self.artifact = artifact
        self.logits = logits
        self.capabilities = FULL
        self.asked: list[tuple[int, ...]] = []

    def prefill(self, slot: int, ids: Sequence[int], start: int, wanted: Sequence[int]) -> np.ndarray:
        assert (slot, start, list(wanted)) == (0, sum(map(len, self.asked)), list(range(len(ids))))
        self.asked.append(tuple(ids))
        return self.logits[start : start + len(ids)]


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    return load_artifact(write_tiny_artifact(tmp_path / "artifact"))


def logits(count: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((count, VOCAB))).astype(np.float32)


def written(path: Path, artifact: Artifact, count: int = 100) -> tuple[ReferenceFile, np.ndarray]:
    values = logits(count)
    write_reference(path, header_for(artifact, random_ids(count)), values)
    return read_reference(path), values


def test_log_probabilities_come_back_in_half_precision(tmp_path: Path, artifact: Artifact) -> None:
    found, values = written(tmp_path / "ref", artifact)
    assert found.header == header_for(artifact, random_ids(100))
    pieces = list(found.chunks())
    assert [start for start, _ in pieces] == [0, 64]
    read = np.concatenate([piece for _, piece in pieces])
    np.testing.assert_array_equal(read, log_softmax(values).astype(np.float16).astype(np.float32))
    assert list(tmp_path.glob("ref*")) == [tmp_path / "ref"]


def test_the_same_reference_gives_the_same_bytes(tmp_path: Path, artifact: Artifact) -> None:
    written(tmp_path / "a", artifact)
    written(tmp_path / "b", artifact)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_divergence_is_that_of_the_logits_within_rounding(tmp_path: Path, artifact: Artifact) -> None:
    """Against the figures from unrounded logits, for a model near and one far."""
    found, values = written(tmp_path / "ref", artifact)
    for noise in (0.0, 0.1, 1.0):
        model = Model(artifact, values + np.float32(noise) * logits(100, seed=1))
        exact = DivergenceSum()
        exact.add(values, model.logits)
        result = divergence(model, found)  # type: ignore[arg-type]  # what it uses of a session
        assert result.kl == pytest.approx(exact.result().kl, abs=ROUNDING, rel=1e-3)
        assert result.top1 == pytest.approx(exact.result().top1, abs=0.02)
        assert [id_ for piece in model.asked for id_ in piece] == random_ids(100)
        assert (result.tokens, result.text, result.oracle) == (100, "random", "the artifact itself")
        assert result.same_source
        assert result.limit == artifact.manifest.recipe.kl_limit + ROUNDING
        assert result.passed is (noise == 0.0)


def test_nan_in_the_model_does_not_pass(tmp_path: Path, artifact: Artifact) -> None:
    found, values = written(tmp_path / "ref", artifact)
    values[50, 3] = np.nan
    assert not divergence(Model(artifact, values), found).passed  # type: ignore[arg-type]  # as above


def test_another_source_is_told(tmp_path: Path, artifact: Artifact) -> None:
    values = logits(10)
    header = msgspec.structs.replace(header_for(artifact, random_ids(10)), source_fingerprint="f" * 64)
    write_reference(tmp_path / "ref", header, values)
    found = divergence(Model(artifact, values), read_reference(tmp_path / "ref"))  # type: ignore[arg-type]  # as above
    assert found.passed
    assert not found.same_source


def test_a_real_session_agrees_with_its_own_reference(tmp_path: Path) -> None:
    artifact = export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "out")
    own_reference(tmp_path / "ref", artifact, random_ids(100))
    found = divergence(open_tiny(artifact), read_reference(tmp_path / "ref"))
    assert found.passed
    assert found.kl < ROUNDING
    own_reference(tmp_path / "noisy", artifact, random_ids(100), noise=0.5)
    assert not divergence(open_tiny(artifact), read_reference(tmp_path / "noisy")).passed


def test_an_unwritable_place_leaves_nothing(tmp_path: Path, artifact: Artifact) -> None:
    with pytest.raises(ResourceError, match="cannot be written"):
        written(tmp_path / "gone" / "ref", artifact)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ResourceError, match="cannot be written"):
        written(tmp_path / "folder", artifact)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["artifact", "folder"]


# -- files that are not to be believed
# ---------------------------------------------------------------------------


def refused(path: Path, pattern: str) -> None:
    with pytest.raises(ArtifactError, match=pattern) as caught:
        read_reference(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def with_header(path: Path, encoded: bytes, body: bytes = b"") -> Path:
    path.write_bytes(b"llorch reference 1\n" + len(encoded).to_bytes(4, "little") + encoded + body)
    return path


@pytest.mark.parametrize(
    "content", [b"", b"llorch", b"llorch reference 2\n" + b"\0" * 9, b"\x93NUMPY\x01", pickle.dumps({"a": 1})]
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ref").write_bytes(content)
    refused(tmp_path / "ref", "is not a reference")


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "gone", "cannot be read")
    refused(tmp_path, "cannot be read")


def test_a_header_longer_than_allowed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "ref"
    path.write_bytes(b"llorch reference 1\n" + (2**32 - 1).to_bytes(4, "little") + b"{}")
    refused(path, "is not a reference")
    refused(with_header(path, b" " * (2**20 + 1)), "is not a reference")


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"vocab_size": 0},
        {"vocab_size": "512"},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [0] * 65537},
        {"text_sha256": "0"},
        {"surplus": 1},
        {"oracle": None},
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    tmp_path: Path, artifact: Artifact, change: dict[str, object]
) -> None:
    header = msgspec.to_builtins(header_for(artifact, [1, 2])) | change
    refused(with_header(tmp_path / "ref", msgspec.json.encode(header), bytes(4 * VOCAB)), "bad header")


@pytest.mark.parametrize("encoded", [b"{", b"\xff\xfe", b"[" * 100_000, b"1"])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, encoded: bytes) -> None:
    refused(with_header(tmp_path / "ref", encoded), "bad header")


@pytest.mark.parametrize("change", [-1, 1, -2 * VOCAB])
def test_another_size_than_the_headers_is_refused(tmp_path: Path, artifact: Artifact, change: int) -> None:
    written(tmp_path / "ref", artifact, 2)
    data = (tmp_path / "ref").read_bytes()
    (tmp_path / "ref").write_bytes(data[:change] if change < 0 else data + bytes(change))
    refused(tmp_path / "ref", "bytes where its header says")


def test_a_header_that_claims_terabytes_costs_nothing(tmp_path: Path, artifact: Artifact) -> None:
    header = msgspec.structs.replace(header_for(artifact, [1, 2]), vocab_size=2**31 - 1)
    refused(
        with_header(tmp_path / "ref", msgspec.json.encode(header)), "8589934588|bytes where its header says"
    )


def test_ids_outside_the_vocabulary_and_another_text_are_refused(tmp_path: Path, artifact: Artifact) -> None:
    good = header_for(artifact, [1, 2])
    outside = msgspec.structs.replace(good, token_ids=(1, 512), text_sha256=text_hash((1, 512)))
    other = msgspec.structs.replace(good, token_ids=(2, 1))
    for header in (outside, other):
        refused(
            with_header(tmp_path / "ref", msgspec.json.encode(header), bytes(4 * VOCAB)),
            "does not hold the text",
        )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no os.mkfifo, and pipes in no folder")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ref")
    refused(tmp_path / "ref", "no regular file|Invalid argument")


def test_a_link_to_a_reference_is_read(tmp_path: Path, artifact: Artifact) -> None:
    found, _ = written(tmp_path / "ref", artifact, 2)
    (tmp_path / "link").symlink_to("ref")
    assert read_reference(tmp_path / "link").header == found.header


def test_values_that_are_not_finite_are_refused(tmp_path: Path, artifact: Artifact) -> None:
    found, values = written(tmp_path / "ref", artifact, 2)
    data = bytearray((tmp_path / "ref").read_bytes())
    data[-2:] = np.float16(np.nan).tobytes()
    (tmp_path / "ref").write_bytes(data)
    with pytest.raises(ArtifactError, match="not finite"):
        divergence(Model(artifact, values), found)  # type: ignore[arg-type]  # as above


def test_a_file_that_shrinks_meanwhile_is_refused(tmp_path: Path, artifact: Artifact) -> None:
    found, _ = written(tmp_path / "ref", artifact)
    data = (tmp_path / "ref").read_bytes()
    (tmp_path / "ref").write_bytes(data[: len(data) // 2])
    with pytest.raises(ArtifactError, match="became shorter"):
        list(found.chunks())


def test_another_tokenizer_or_a_shorter_context_is_refused(tmp_path: Path, artifact: Artifact) -> None:
    found, _ = written(tmp_path / "ref", artifact)
    short = load_artifact(write_tiny_artifact(tmp_path / "short", tiny_manifest(context_length=99)))
    with pytest.raises(ArtifactError, match=r"100 positions and .* takes 99"):
        check_reference(found, short)
    other = msgspec.structs.replace(found.header, tokenizer_sha256="0" * 64)
    with pytest.raises(ArtifactError, match="another tokenizer"):
        check_reference(ReferenceFile(found.path, other, found.offset), artifact)
