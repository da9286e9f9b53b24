"""The process that packs an artifact's weights: ``python -m llorch_serve.runtime.weights_packing``.

Input: a :class:`PackingOrder` on stdin, from ``shared_weights.py``. Output: in the order's folder, the
artifact's own graphs, whose weights now lie in one file, each beside what the runtime packs it into. A
process of its own, since packing takes as much memory as another worker.

The runtime writes what it has packed when it saves a graph (``session.save_external_prepacked_constant_
initializers``): a graph of its own making, and a file with every weight and its packed form. From there the
packed forms are taken, and no more. One that several graphs have is written once, so that the system keeps
one copy of it in memory for all graphs and all processes. When it loads such a graph, the runtime packs each
weight once more, and takes the packed form from the file only if the hash of both is the same.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.artifact.manifest import Recipe
from llorch_serve.errors import ArtifactError, LlorchError
from llorch_serve.files.durable import flush_tree
from llorch_serve.providers import import_runtime
from llorch_serve.providers.onnx_messages import model_class
from llorch_serve.runtime.graph_loading import graph_options
from llorch_serve.runtime.shared_weights import PackingOrder

WEIGHTS: Final = "weights.bin"
_PAGE: Final = 4096
_CHUNK_BYTES: Final = 8 * 2**20
_SMALLEST: Final = "1024"  # bytes; what is smaller stays in the graph, where the runtime infers shapes by it


@dataclass(frozen=True, slots=True)
class _Region:
    """Where bytes lie in a file."""

    file: Path
    offset: int
    length: int


@dataclass(slots=True)
class _Weights:
    """The file that is written. places: of regions that it has, by the SHA-256 of their bytes."""

    file: BinaryIO
    places: dict[bytes, int] = field(default_factory=dict)

    def add(self, region: _Region) -> int:
        """Return where a region's bytes lie, written now unless the file has the same already."""
        digest = hashlib.sha256()
        for chunk in _chunks(region):
            digest.update(chunk)
        key = digest.digest()
        if key not in self.places:
            # Whole pages, so that what graphs share is shared in memory.
            self.file.write(bytes(-self.file.tell() % _PAGE))
            self.places[key] = self.file.tell()
            for chunk in _chunks(region):
                self.file.write(chunk)
        return self.places[key]


def _chunks(region: _Region) -> Iterator[bytes]:
    with region.file.open("rb") as file:
        file.seek(region.offset)
        left = region.length
        while left:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise ArtifactError(f"{region.file} ends before {region.offset + region.length} bytes")
            left -= len(chunk)
            yield chunk


def pack(order: PackingOrder) -> None:
    """Write the folder. Raises ArtifactError if a file is not what the manifest says, and whatever the
    runtime raises.
    """
    artifact = load_artifact(Path(order.artifact), verify_hashes=True)
    runtime = import_runtime(artifact.manifest.min_onnxruntime)
    sizes = {entry.path: entry.bytes for entry in artifact.manifest.files}
    folder = Path(order.folder)
    with (folder / WEIGHTS).open("xb") as file:
        weights = _Weights(file)
        for name, recipe in order.graphs.items():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                saved = Path(scratch) / "saved.onnx"
                _save(artifact.folder / name, recipe, runtime, order.threads, saved)
                model = _with_places(artifact.folder, name, sizes, weights, _packed(saved))
            (folder / name).write_bytes(model.SerializeToString())
    flush_tree(folder)


def _save(graph: Path, recipe: Recipe, runtime: Any, threads: int, target: Path) -> None:
    """Have the runtime write a graph as it runs it, with its weights and their packed forms."""
    options = graph_options(recipe, runtime, threads)
    options.optimized_model_filepath = str(target)
    for key, value in {
        "session.save_external_prepacked_constant_initializers": "1",
        "session.optimized_model_external_initializers_file_name": f"{target.name}.data",
        "session.optimized_model_external_initializers_min_size_in_bytes": _SMALLEST,
    }.items():
        options.add_session_config_entry(key, value)
    runtime.InferenceSession(str(graph), sess_options=options, providers=["CPUExecutionProvider"])


def _read(path: Path) -> Any:
    model = model_class()()
    model.ParseFromString(path.read_bytes())
    return model


def _packed(saved: Path) -> dict[str, dict[str, tuple[str, list[tuple[_Region, str]]]]]:
    """Return what the runtime has written: weight -> key in the graph -> its name for the form, and the
    form's buffers, each with a flag.
    """
    data = saved.with_name(f"{saved.name}.data")
    found: dict[str, dict[str, tuple[str, list[tuple[_Region, str]]]]] = {}
    for tensor in _read(saved).graph.initializer:
        for entry in tensor.external_data:
            if entry.key.startswith("prepacked"):
                form, *buffers = entry.value.split("|")
                parts = [buffer.split(";") for buffer in buffers]
                regions = [(_Region(data, int(offset), int(length)), flag) for offset, length, flag in parts]
                found.setdefault(tensor.name, {})[entry.key] = (form, regions)
    return found


def _with_places(
    folder: Path,
    name: str,
    sizes: Mapping[str, int],
    weights: _Weights,
    packed: Mapping[str, Mapping[str, tuple[str, list[tuple[_Region, str]]]]],
) -> Any:
    """Return an artifact's graph whose weights lie in the written file, with their packed forms.

    sizes: of the artifact's files; no other is read.
    """
    model = _read(folder / name)
    for tensor in model.graph.initializer:
        if not tensor.external_data:
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        place, offset, length = (entries.get(key, "") for key in ("location", "offset", "length"))
        start, count = int(offset or 0), int(length)
        if place not in sizes or start < 0 or count < 0 or start + count > sizes[place]:
            raise ArtifactError(
                f"{folder / name}: {tensor.name[:100]!r} lies at {start} in {place[:100]!r}, which the "
                "artifact has not; export the model again"
            )
        moved = {
            "location": WEIGHTS,
            "offset": str(weights.add(_Region(folder / place, start, count))),
            "length": str(count),
        }
        for key, (form, buffers) in packed.get(tensor.name, {}).items():
            places = [f"{weights.add(region)};{region.length};{flag}" for region, flag in buffers]
            moved[key] = "|".join((form, *places))
        del tensor.external_data[:]
        for key, value in moved.items():
            tensor.external_data.add(key=key, value=value)
    return model


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Read an order, one line, and end with 0, or with 1 and one line on stderr; end at once when stdin is
    closed, since whoever asked is gone then.
    """
    os.umask(0o077)
    try:
        # Unbuffered: an object with a buffer would be locked by the thread that waits for its end.
        with open(0, "rb", buffering=0, closefd=False) as orders:
            order = msgspec.json.decode(orders.readline(), type=PackingOrder)
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        pack(order)
    except LlorchError as error:
        sys.exit(str(error))
    except Exception as error:  # noqa: BLE001 - whatever the runtime raises, told in one line
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")


if __name__ == "__main__":
    main()
