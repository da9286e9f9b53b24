"""Packed weights that processes share: the same bits, one file for all graphs, and a cache that trusts nobody
else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import onnx
import pytest

from llorch_export.options import ExportOptions, Rule
from llorch_serve.artifact.folder import Artifact, load_artifact
from llorch_serve.config import SessionConfig
from llorch_serve.errors import ArtifactError, ResourceError, UsageError
from llorch_serve.loading.models import open_model
from llorch_serve.python_child import child_environment, module_command
from llorch_serve.runtime import shared_weights
from llorch_serve.runtime.opening import open_session
from llorch_serve.runtime.shared_weights import PackingOrder
from llorch_serve.runtime.weights_packing import WEIGHTS
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, random_ids

pytestmark = pytest.mark.skipif(shared_weights.lacking() is not None, reason="weights are shared on POSIX")

IDS = random_ids(24)
PROMPTS = ExportOptions(
    "", Path(), precision="int8", activations="row", rules=(Rule(("*.mlp.down_proj",), activations="block"),)
)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Two graphs: the one for prompts has some weights of its own, and shares others."""
    folder = tmp_path_factory.mktemp("shared")
    source = write_hf_folder(folder / "source")
    return export_tiny(source, folder / "artifact", precision="int8", prompts=PROMPTS)


@pytest.fixture(scope="module")
def packed(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache's folder with the artifact's entry."""
    root = tmp_path_factory.mktemp("packed") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLORCH_CACHE", str(root))
        assert opened(artifact)[1] is None
    return root


@pytest.fixture
def cache(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which this test's sessions take; its folder of weights."""
    shutil.copytree(packed, tmp_path / "cache")
    monkeypatch.setenv("LLORCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def opened(artifact: Artifact, **options: Any) -> tuple[Any, str | None]:
    """Open a session over shared weights; return it and what a person is told."""
    told: list[str | None] = []
    config = SessionConfig(threads=1, slots=2, share_weights=True, max_context=64)
    session = open_session(artifact, replace(config, **options), lambda report: told.append(report.notice))
    return session, told[0]


def bits(session: Any) -> bytes:
    """Return the logits of a prompt and of some steps after it."""
    found = [session.prefill(slot, IDS, 0, range(len(IDS))).tobytes() for slot in (0, 1)]
    found += [session.decode([7 + n, 9], [len(IDS) + 1 + n] * 2).tobytes() for n in range(3)]
    return b"".join(found)


def entry(cache: Path) -> Path:
    (found,) = [path for path in cache.iterdir() if path.is_dir()]
    return found


def never(*args: object) -> None:
    raise AssertionError("packed again")


def test_shared_weights_give_the_same_bits(
    artifact: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_weights, "_run", never)
    session, notice = opened(artifact)
    assert notice is None
    expected, _ = opened(artifact, share_weights=False)
    assert bits(session) == bits(expected)


def test_both_graphs_map_one_file(artifact: Artifact, cache: Path) -> None:
    if sys.platform != "linux":
        return
    session, _ = opened(artifact)
    bits(session)
    assert str(entry(cache) / WEIGHTS) in Path("/proc/self/maps").read_text(encoding="utf-8")
    decode, prompts = (packed_places(entry(cache) / name) for name in ("decode.onnx", "prompts.onnx"))
    assert decode & prompts
    assert decode ^ prompts


def packed_places(graph: Path) -> set[str]:
    """Return where a graph's packed forms lie, and for which operator."""
    return {
        item.value
        for tensor in onnx.load(graph, load_external_data=False).graph.initializer
        for item in tensor.external_data
        if item.key.startswith("prepacked")
    }


def test_an_artifact_of_other_weights_has_an_entry_of_its_own(
    artifact: Artifact, cache: Path, tmp_path: Path
) -> None:
    source = write_hf_folder(tmp_path / "source", seed=5)
    other = export_tiny(source, tmp_path / "other", precision="int8", prompts=PROMPTS)
    session, _ = opened(other)
    assert sum(path.is_dir() for path in cache.iterdir()) == 2
    expected, _ = opened(other, share_weights=False)
    assert bits(session) == bits(expected)


def _shorten(entry: Path) -> None:
    with (entry / WEIGHTS).open("r+b") as file:
        file.truncate(4096)


def _overwrite(entry: Path) -> None:
    with (entry / WEIGHTS).open("r+b") as file:
        file.seek(8192)
        file.write(bytes(64))


def _add(entry: Path) -> None:
    (entry / "more").write_bytes(b"1")


def _garble(entry: Path) -> None:
    (entry / "entry.json").write_text("{")


@pytest.mark.parametrize(
    "spoil", [_shorten, _overwrite, _add, _garble, lambda e: (e / "entry.json").unlink()]
)
def test_an_entry_that_is_not_as_it_was_written_is_made_anew(
    cache: Path, spoil: Callable[[Path], None]
) -> None:
    place = entry(cache)
    spoil(place)
    assert not shared_weights._usable(place)
    assert not place.exists()


def _everybody(path: Path) -> None:
    path.chmod(0o777 if path.is_dir() else 0o666)


def _link(path: Path) -> None:
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)


@pytest.mark.parametrize("hostile", [_everybody, _link])
@pytest.mark.parametrize("what", [".", "entry", "entry/weights.bin", "entry/decode.onnx", "entry/entry.json"])
def test_what_others_could_have_written_is_refused(
    artifact: Artifact, cache: Path, what: str, hostile: Callable[[Path], None]
) -> None:
    place = entry(cache)
    place.rename(cache / "entry")
    hostile(cache / what)
    (cache / "entry").rename(place)
    with pytest.raises(UsageError, match="remove it, or set LLORCH_CACHE"):
        opened(artifact)


def test_what_another_user_owns_is_refused(
    artifact: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UsageError, match=f"belongs to user {cache.stat().st_uid}; expected"):
        opened(artifact)


def test_a_cache_below_a_folder_that_everybody_writes_is_refused(artifact: Artifact, cache: Path) -> None:
    cache.parent.chmod(0o777)
    with pytest.raises(UsageError, match="can be written by everybody"):
        opened(artifact)
    cache.parent.chmod(0o1777)  # as /tmp, where nobody may rename another's
    assert opened(artifact)[1] is None


def test_where_packing_fails_the_artifacts_own_graphs_run_and_a_person_is_told(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLORCH_CACHE", str(tmp_path / "cache"))

    def fail(order: object) -> None:
        raise ResourceError("packing failed: no room")

    monkeypatch.setattr(shared_weights, "_run", fail)
    session, notice = opened(artifact)
    assert notice == "weights are not shared: packing failed: no room"
    assert not [path for path in (tmp_path / "cache" / "weights").iterdir() if path.is_dir()]
    expected, _ = opened(artifact, share_weights=False)
    assert bits(session) == bits(expected)


def test_packing_ends_with_the_process_that_asked_for_it(artifact: Artifact, tmp_path: Path) -> None:
    graphs = {artifact.manifest.graph: artifact.manifest.recipe}
    order = PackingOrder(artifact=str(artifact.folder), graphs=graphs, folder=str(tmp_path), threads=1)
    command = module_command(sys.executable, "llorch_serve.runtime.weights_packing")
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=child_environment()) as packer:
        assert packer.stdin is not None
        packer.stdin.write(msgspec.json.encode(order) + b"\n")
        packer.stdin.close()
        assert packer.wait() != 0
    assert not (tmp_path / artifact.manifest.graph).exists()


def test_what_a_killed_process_was_making_is_removed(artifact: Artifact, cache: Path) -> None:
    left = cache / ".making-1234"
    left.mkdir(mode=0o700)
    (left / WEIGHTS).write_bytes(b"1")
    opened(artifact)
    assert not left.exists()


def test_files_that_are_not_what_the_manifest_says_are_not_packed(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an artifact that lies about its files would put its weights under another's name."""
    monkeypatch.setenv("LLORCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "liar"
    shutil.copytree(artifact.folder, folder)
    with (folder / "model.onnx.data").open("r+b") as file:
        file.write(b"\1\2\3\4")
    _, notice = opened(load_artifact(folder))
    assert notice is not None
    assert "weights are not shared: packing failed" in notice
    assert "model.onnx.data" in notice


def test_the_entries_unused_for_longest_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(entry(cache))
    sizes = {"old": 3000, "new": 3000, "kept": 6000}
    for age, (name, size) in enumerate(sizes.items()):
        (cache / name).mkdir()
        (cache / name / WEIGHTS).write_bytes(bytes(size))
        (cache / name / "entry.json").write_text(json.dumps({}))
        os.utime(cache / name / "entry.json", (age, age))
    monkeypatch.setattr(shared_weights, "MOST_BYTES", 9500)
    shared_weights._bound(cache, keep="kept")
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == ["kept", "new"]


def test_too_little_disk_is_told_before_anything_is_written(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLORCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shared_weights, "_run", never)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 0))
    _, notice = opened(artifact)
    assert notice is not None
    assert "0.0 GiB free" in notice
    monkeypatch.setattr(shared_weights, "MOST_BYTES", 1000)
    _, notice = opened(artifact)
    assert notice is not None
    assert "expected at most" in notice


def test_a_graph_that_is_not_for_the_cpu_refuses(source_free: Artifact, cache: Path) -> None:
    with pytest.raises(UsageError, match="--share-weights has no effect"):
        open_model(source_free, SessionConfig(threads=1, slots=1, share_weights=True), lambda report: None)


@pytest.fixture(scope="module")
def source_free(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """An artifact whose graphs have fixed shapes."""
    folder = tmp_path_factory.mktemp("fixed")
    return export_tiny(
        write_hf_folder(folder / "source"), folder / "artifact", target="coreml", max_context=64
    )


def test_huge_pages_and_shared_weights_exclude_each_other(artifact: Artifact, cache: Path) -> None:
    config = SessionConfig(threads=1, slots=1, share_weights=True, huge_pages=True)
    with pytest.raises(UsageError, match="--huge-pages has no effect on weights that --share-weights"):
        open_model(artifact, config, lambda report: None)


def test_two_workers_that_start_at_once_pack_once(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache" / "weights"
    monkeypatch.setenv("LLORCH_CACHE", str(tmp_path / "cache"))
    (root / ".making-before").mkdir(parents=True)  # left by a process that was killed
    (tmp_path / "cache").chmod(0o700)
    root.chmod(0o700)
    orders: list[shared_weights.PackingOrder] = []
    both = threading.Barrier(2, timeout=20)

    def pack(order: shared_weights.PackingOrder) -> None:
        orders.append(order)
        (Path(order.folder) / WEIGHTS).write_bytes(b"packed")
        (Path(order.folder) / WEIGHTS).chmod(0o600)

    monkeypatch.setattr(shared_weights, "_run", pack)
    monkeypatch.setattr(shared_weights, "_LOOK_S", 0.001)
    runtime = SimpleNamespace(__version__="1.32.0", get_build_info=lambda: "")

    def start() -> shared_weights.SharedGraphs:
        both.wait()
        return shared_weights.shared_graphs(artifact, {"model.onnx": artifact.manifest.recipe}, runtime, 1)

    with ThreadPoolExecutor(2) as threads:
        found = [made.result() for made in [threads.submit(start), threads.submit(start)]]
    assert found[0] == found[1]
    assert found[0].notice is None
    assert len(orders) == 1
    assert not list(root.glob(".making-*"))


def test_an_entry_that_the_runtime_does_not_take_is_named(
    artifact: Artifact, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is after a fault of the disk, which changes neither size nor time."""
    place = entry(cache)
    graph = place / "decode.onnx"
    found = graph.stat()
    graph.write_bytes(bytes(found.st_size))
    os.utime(graph, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(ArtifactError, match=f"remove {place}, or leave --share-weights out"):
        opened(artifact)
