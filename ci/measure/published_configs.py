"""How many published configs are accepted, by family, and why the others are not: a table of Markdown.

Input: a file of JSON Lines with ``name`` and ``config``, or a folder of config.json files that are called
``NAME.json``. Without one, those that the tests hold.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llorch_export.config.families import FAMILIES
from llorch_export.config.hf import config_from_hf
from llorch_serve.errors import ArtifactError

_HELD = Path(__file__).parents[2] / "tests" / "data" / "published" / "configs.jsonl"


def table(configs: Iterator[tuple[str, dict[str, Any]]]) -> str:
    """Return the table, and below it each refusal in one line."""
    accepted: dict[str, int] = defaultdict(int)
    refused: dict[str, list[str]] = defaultdict(list)
    for name, data in configs:
        kind = data.get("model_type")
        if kind not in FAMILIES:
            continue
        try:
            config_from_hf(data, origin=name)
            accepted[kind] += 1
        except ArtifactError as error:
            refused[kind].append(str(error))
    rows = [f"| `{kind}` | {accepted[kind]} | {len(refused[kind])} |" for kind in FAMILIES]
    total = f"| all | {sum(accepted.values())} | {sum(map(len, refused.values()))} |"
    reasons = [f"- {message}" for messages in refused.values() for message in messages]
    return "\n".join(["| family | accepted | refused |", "|---|---|---|", *rows, total, "", *reasons]) + "\n"


def _configs(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if source.is_dir():
        for path in sorted(source.glob("*.json")):
            yield path.stem, json.loads(path.read_text(encoding="utf-8"))
        return
    for line in source.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["name"], row["config"]


if __name__ == "__main__":
    sys.stdout.write(table(_configs(Path(sys.argv[1]) if len(sys.argv) > 1 else _HELD)))
