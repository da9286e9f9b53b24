"""How many published configs are accepted, planned and read as transformers reads them, by family, and why
the others are not: a table of Markdown.

Input: a file of JSON Lines with ``name`` and ``config``, or a folder of config.json files that are called
``NAME.json``. Without one, those that the tests hold.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from llorch_export.config.families import FAMILIES, SUPPORTED_HF
from llorch_export.config.hf import config_from_hf
from llorch_export.options import ExportOptions
from llorch_export.preview import preview
from llorch_serve.errors import ArtifactError, UsageError
from support.oracles.config_reading import differences, transformers_config

_HELD = Path(__file__).parents[2] / "tests" / "data" / "published"
_COLUMNS = "| family | accepted | planned by `--dry-run` | read as transformers reads them | refused |"


@dataclass
class _Count:
    """Names of a family's configs. planned, equal: of those that are accepted. refused: with the reason."""

    accepted: int = 0
    planned: int = 0
    equal: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, data: dict[str, Any]) -> None:
        """Read one and plan its export."""
        try:
            found = config_from_hf(data, origin=name)
        except ArtifactError as error:
            self.refused.append(str(error).replace(f"; {SUPPORTED_HF}", ""))
            return
        self.accepted += 1
        try:
            _plan(data)
            self.planned += 1
        except (ArtifactError, UsageError) as error:
            self.wrong.append(f"{name} cannot be planned: {error}")
        try:
            others = differences(found, transformers_config(data))
        except (KeyError, TypeError, ValueError, RuntimeError, StrictDataclassError) as error:
            self.wrong.append(f"{name}: transformers cannot read it: {' '.join(str(error).split())[:200]}")
            return
        self.equal += not others
        self.wrong += [f"{name}: {line}" for line in others]

    def row(self, name: str) -> str:
        """Return the row of a table."""
        cells = (name, self.accepted, self.planned, self.equal, len(self.refused))
        return f"| {' | '.join(map(str, cells))} |"


def table(configs: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Return the table; below it what is not as it should be, and each refusal in one line."""
    counts: dict[str, _Count] = defaultdict(_Count)
    for name, data in configs:
        kind = str(data.get("model_type"))
        counts[kind if kind in FAMILIES else "others"].add(name, data)
    total = _Count(
        *(sum(getattr(count, key) for count in counts.values()) for key in ("accepted", "planned", "equal")),
        [line for count in counts.values() for line in count.refused],
    )
    names = [*(kind for kind in FAMILIES if kind in counts), "others"]
    rows = [counts[kind].row(f"`{kind}`" if kind in FAMILIES else kind) for kind in names]
    wrong = [f"- **{line}**" for count in counts.values() for line in count.wrong]
    refused = [f"- {line}" for line in total.refused]
    return (
        "\n".join([_COLUMNS, "|---|---|---|---|---|", *rows, total.row("all"), "", *wrong, *refused]) + "\n"
    )


def _plan(data: dict[str, Any]) -> None:
    """Plan the export of a folder that has this config alone. Raises as the export does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(data), encoding="utf-8")
        preview(ExportOptions(str(source), Path(folder) / "out"))


def _configs(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if source.is_dir():
        for path in sorted(source.glob("*.json")):
            yield path.stem, json.loads(path.read_text(encoding="utf-8"))
        return
    for line in source.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["name"], row["config"]


def _held() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("configs.jsonl", "other_configs.jsonl"):
        yield from _configs(_HELD / name)


if __name__ == "__main__":
    sys.stdout.write(table(_configs(Path(sys.argv[1])) if len(sys.argv) > 1 else _held()))
