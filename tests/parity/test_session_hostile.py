"""Graphs that lie: external data outside the folder, garbage, and other inputs than the manifest's are
refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_serve.artifact.folder import MANIFEST_NAME, load_artifact
from llorch_serve.artifact.manifest import FileEntry, Manifest, TensorSpec, decode_manifest, encode_manifest
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError
from llorch_serve.runtime.opening import open_session
from llorch_serve.runtime.session import DecoderSession
from support.builders.checkpoints import write_hf_folder
from support.builders.linked_folders import as_folder_beside_a_volume, as_hub_snapshot, as_volume

DATA = "model.onnx.data"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    source = write_hf_folder(folder / "source")
    options = ExportOptions(str(source), folder / "artifact", precision="fp32")
    return export(options, lambda _phase, _done, _total: None).artifact.folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy of the artifact, beside a folder whose w.data holds the true weights."""
    copy = tmp_path / "artifact"
    shutil.copytree(exported, copy)
    (tmp_path / "outside").mkdir()
    shutil.copy(copy / DATA, tmp_path / "outside" / "w.data")
    return copy


def opened(folder: Path) -> DecoderSession:
    return open_session(load_artifact(folder), SessionConfig(threads=1, slots=1), lambda _report: None)


def edit_manifest(folder: Path, edit: Callable[[Manifest], Manifest]) -> None:
    path = folder / MANIFEST_NAME
    path.write_bytes(encode_manifest(edit(decode_manifest(path.read_bytes(), origin="test"))))


def replace_graph(folder: Path, data: bytes) -> None:
    """Write another model.onnx and list it truly, as someone would who made the folder."""
    (folder / "model.onnx").write_bytes(data)
    entry = FileEntry(path="model.onnx", bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    edit_manifest(
        folder,
        lambda m: msgspec.structs.replace(
            m, files=tuple(entry if e.path == "model.onnx" else e for e in m.files)
        ),
    )


def point_data_at(folder: Path, location: str) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    entries = [e for tensor in model.graph.initializer for e in tensor.external_data if e.key == "location"]
    assert entries
    for entry in entries:
        entry.value = location
    replace_graph(folder, model.SerializeToString())


def test_the_rewritten_graph_itself_is_fine(folder: Path) -> None:
    (folder / "renamed").symlink_to(DATA)
    point_data_at(folder, "renamed")
    assert opened(folder).prefill(0, [1, 2], 0).shape[0] == 1


OUTSIDE = {
    "parent": "../outside/w.data",
    "password file": "../../etc/passwd",
    "through a folder inside": "inner/../../outside/w.data",
    "absolute": "{parent}/outside/w.data",
    "absolute password file": "/etc/passwd",
    "link": "link",
    "link to a folder": "linked/w.data",
    "address in memory": "*/_ORT_MEM_ADDR_/*",
}


@pytest.mark.parametrize("location", OUTSIDE.values(), ids=OUTSIDE)
def test_weights_outside_the_folder_are_never_read(folder: Path, location: str) -> None:
    (folder / "inner").mkdir()
    (folder / "link").symlink_to(folder.parent / "outside" / "w.data")
    (folder / "linked").symlink_to(folder.parent / "outside")
    # The data there is valid, so only a check of the path can refuse it.
    point_data_at(folder, location.format(parent=folder.parent))
    with pytest.raises(ArtifactError, match=r"model\.onnx cannot be loaded") as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


def test_data_replaced_by_a_link_to_outside_is_refused_with_the_manifest(folder: Path) -> None:
    (folder / DATA).unlink()
    (folder / DATA).symlink_to(folder.parent / "outside" / "w.data")
    with pytest.raises(ArtifactError, match="outside"):
        opened(folder)


@pytest.mark.parametrize("layout", [as_hub_snapshot, as_volume, as_folder_beside_a_volume])
def test_an_artifact_of_links_runs_as_one_of_files(
    folder: Path, tmp_path: Path, layout: Callable[..., Path]
) -> None:
    expected = opened(folder).prefill(0, [1, 2], 0).copy()
    more = ("model",) if layout is as_folder_beside_a_volume else ()
    linked = layout(folder, tmp_path / "links", *more)
    assert (linked / DATA).is_symlink()
    np.testing.assert_array_equal(opened(linked).prefill(0, [1, 2], 0), expected)


def test_a_newer_format_than_the_runtimes_is_named_with_both_versions(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    model.ir_version = 99
    replace_graph(folder, model.SerializeToString())
    found = rf"IR version 99, and onnxruntime {re.escape(onnxruntime.__version__)} goes up to \d+; upgrade"
    with pytest.raises(ArtifactError, match=found) as caught:
        opened(folder)
    assert "xport the model again" not in str(caught.value)


def test_a_newer_opset_than_the_runtimes_is_named_with_both_versions(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    next(entry for entry in model.opset_import if not entry.domain).version = 99
    replace_graph(folder, model.SerializeToString())
    found = (
        rf"opset 99 of ai.onnx, and onnxruntime {re.escape(onnxruntime.__version__)} goes up to \d+; upgrade"
    )
    with pytest.raises(ArtifactError, match=found):
        opened(folder)


@pytest.mark.parametrize(
    "data", [b"", b"not a graph", b"\x08\x0b", os.urandom(4096)], ids=["empty", "text", "start", "noise"]
)
def test_garbage_is_no_graph(folder: Path, data: bytes) -> None:
    replace_graph(folder, data)
    with pytest.raises(ArtifactError, match=r"model\.onnx") as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_end_too_early_are_refused(folder: Path) -> None:
    with (folder / DATA).open("r+b") as file:
        size = file.seek(-1000, os.SEEK_END)
        file.truncate()
    with pytest.raises(ArtifactError, match="bytes where the manifest says"):
        opened(folder)
    edit_manifest(
        folder,
        lambda m: msgspec.structs.replace(
            m,
            files=tuple(msgspec.structs.replace(e, bytes=size) if e.path == DATA else e for e in m.files),
        ),
    )
    with pytest.raises(ArtifactError, match=r"model\.onnx cannot be loaded"):
        opened(folder)


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("more", [True, False])
def test_other_tensors_than_the_manifests_are_refused_by_name(folder: Path, side: str, more: bool) -> None:
    def edit(manifest: Manifest) -> Manifest:
        specs = getattr(manifest, side)
        extra = TensorSpec(name="extra", dtype="float32", shape=(1,))
        return msgspec.structs.replace(manifest, **{side: (*specs, extra) if more else specs[1:]})

    missing = "extra" if more else {"inputs": "input_ids", "outputs": "logits"}[side]
    edit_manifest(folder, edit)
    with pytest.raises(ArtifactError, match=f"{side} differ from the manifest .*{missing}"):
        opened(folder)
