"""The questions of ``questions.jsonl`` as lm-eval's data set, without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets


def load(**_: Any) -> dict[str, datasets.Dataset]:
    """Return the split ``test``: question, choices and the index of the right one."""
    lines = (Path(__file__).parent / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": datasets.Dataset.from_list([json.loads(line) for line in lines])}
