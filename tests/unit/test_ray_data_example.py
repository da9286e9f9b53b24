"""``examples/ray_data_batch.py``: what each of Ray's actors does with a batch of rows, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from support.fakes.generator import FakeGenerator
from support.harness.rpc import running_server
from support.harness.scripts import load_script


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/ray_data_batch.py")


def test_a_batch_gets_its_answers_and_keeps_its_columns(example: Any) -> None:
    generator = FakeGenerator(capacity=3)  # some are refused at first
    rows = {
        "custom_id": np.array(["a", "b", "c", "d", "e"]),
        "prompt": np.array(["x"] * 5),
        "n": np.arange(5),
    }
    with running_server(generator) as server:
        found = example.Answers(server.address)(rows)
    assert found["n"].tolist() == [0, 1, 2, 3, 4]
    assert found["completion_tokens"].tolist() == [example.MAX_TOKENS] * 5
    assert all(text.startswith("w0 w1 ") for text in found["text"])
    assert set(found["finish_reason"]) == {"length"}
    seeds = {request.sampling.seed for request in generator.submitted}
    assert len(seeds) == 5  # of their ids, however often they were asked for


def test_rows_of_earlier_jobs_are_known(example: Any, tmp_path: Path) -> None:
    assert example.answered(tmp_path / "none") == set()
    assert example.answered(tmp_path) == set()
    for number in range(2):
        parquet.write_table(pyarrow.table({"custom_id": [f"r{number}"]}), tmp_path / f"{number}.parquet")
    assert example.answered(tmp_path) == {"r0", "r1"}
