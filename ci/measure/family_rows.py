"""How far each family's drawn configurations are from transformers, and whether every layer passes: a table.

Input: names of families; without one, all. Each row of the table is printed once its family is done.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from llorch_export.config.families import FAMILIES
from support.builders.family_rows import family_rows
from support.harness.family_rows import largest_difference


def measured(model_type: str) -> str:
    """Return the row of a family. Raises AssertionError, with the configuration, where one departs."""
    rows, differences = family_rows(model_type), []
    for row in rows:
        with tempfile.TemporaryDirectory() as place:
            differences.append(largest_difference(row, Path(place), layers=True))
    return f"| `{model_type}` | {len(rows)} | {max(differences):.1e} | {len(rows)} |"


if __name__ == "__main__":
    head = "| family | configurations | largest difference of a logit | of them `verify --layers` passes |"
    sys.stdout.write(f"{head}\n|---|---|---|---|\n")
    for name in sys.argv[1:] or FAMILIES:
        sys.stdout.write(f"{measured(name)}\n")
        sys.stdout.flush()
