"""What tools that pack layers store of a matrix, against what they themselves make of it again."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.checkpoint.packed.base import PackedModule
from llorch_export.checkpoint.packed.modules import reader_of
from llorch_export.checkpoint.packed.stored import DTYPES, StoredArray
from llorch_export.checkpoint.safetensors import file_tensors
from llorch_export.config.packed.base import Packing
from llorch_export.config.packed.reading import read_packing, read_packing_file
from support.builders.raw_safetensors import save

PUBLISHED = Path(__file__).parents[1] / "data" / "published" / "packed_layers.jsonl"
VECTORS = [json.loads(line) for line in PUBLISHED.read_text().splitlines()]
# Its quantizer multiplies by 127 over the largest value, and its file holds the largest value over 127.
LAST_BIT = {"nvidia-modelopt 0.47.0: int8": 2}


def _stored(part: dict[str, Any]) -> npt.NDArray[Any]:
    data = np.frombuffer(base64.b64decode(part["data"]), DTYPES[part["kind"]])
    return data.reshape(part["shape"])


@pytest.mark.parametrize("row", VECTORS, ids=[f"{row['tool']}: {row['label']}" for row in VECTORS])
def test_a_matrix_is_read_as_its_tool_reads_it(tmp_path: Path, row: dict[str, Any]) -> None:
    parts = {f"m.{name}": _stored(part) for name, part in row["parts"].items()}
    save(tmp_path / "model.safetensors", parts, row.get("notes"))
    found = file_tensors(tmp_path / "model.safetensors", ModelFolder(tmp_path), packed=True)
    places = {
        name.removeprefix("m."): StoredArray.at(tensor.source, tensor.dtype, tensor.notes)
        for name, tensor in found.items()
    }
    if "file" in row:
        packing = read_packing_file(row["settings"], name=row["file"], origin=row["file"])
    else:
        packing = read_packing(row["settings"], origin="config.json")
    assert isinstance(packing, Packing)
    expected = _stored(row["weight"])
    matrix = reader_of(packing).read(PackedModule("m", expected.shape, places))
    assert matrix is not None
    # Some tools compute in half precision, and round what is exact here.
    values = matrix.load_rows(0, expected.shape[0]).astype(expected.dtype)
    apart = LAST_BIT.get(f"{row['tool']}: {row['label']}", 0)
    np.testing.assert_array_max_ulp(values, expected, maxulp=apart)
