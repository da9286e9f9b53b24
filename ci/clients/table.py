"""The clients, as ``clients.toml`` lists them, and what they show."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
CACHE: Final = ROOT / ".cache" / "clients"


@dataclass(frozen=True)
class Client:
    """A client: its name, its pinned packages, and the script that uses it."""

    name: str
    packages: tuple[str, ...]
    script: str

    @property
    def is_npm(self) -> bool:
        """Whether it runs on Node."""
        return self.script.endswith(".mjs")

    @property
    def environment(self) -> Path:
        """Where its packages are installed: one folder for each set of pins."""
        label = hashlib.sha256("\n".join(self.packages).encode()).hexdigest()[:12]
        return CACHE / f"{Path(self.script).stem.split('_')[0]}-{label}"


@dataclass
class Shown:
    """What a client showed: rows in their order, and what it ended with."""

    client: Client
    rows: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""

    @property
    def holds(self) -> bool:
        """Whether all is as it should be."""
        return not self.failure and bool(self.rows) and all(row["holds"] for row in self.rows)


def clients() -> list[Client]:
    """Return all clients of the table."""
    table = tomllib.loads((HERE / "clients.toml").read_text(encoding="utf-8"))
    return [Client(one["name"], tuple(one["packages"]), one["script"]) for one in table["client"]]
