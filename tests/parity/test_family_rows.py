"""Each family computes what transformers computes in 51 configurations, layer by layer in a fifth of them.

``ci/measurement family_rows`` prints them as a table, and looks into the layers of all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llorch_export.config.families import FAMILIES
from support.builders.family_rows import ROWS, family_rows
from support.harness.family_rows import largest_difference


@pytest.mark.slow
@pytest.mark.reference
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_computes_what_transformers_computes(tmp_path: Path, model_type: str) -> None:
    rows = family_rows(model_type)
    assert len(rows) >= ROWS
    for index, row in enumerate(rows):
        largest_difference(row, tmp_path / str(index), layers=index % 5 == 0)
