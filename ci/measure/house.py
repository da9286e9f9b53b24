"""How the two packages are built, in numbers: files at their roots, floors of imports, the longest functions.

    ci/measurement house [FOLDER ...]

Each FOLDER is a checkout; without one it is this one. A floor is one more than the highest floor that a
module imports from, modules that import each other in a circle counted as one; imports within functions count
too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PACKAGES: Final = ("serve/llorch_serve", "export/llorch_export", "serve/llorch")
GENERATED: Final = ("worker_pb2.py", "worker_pb2_grpc.py")


@dataclass(frozen=True, slots=True)
class Function:
    """A function as it stands in its file. lines: of all of it. parameters: without ``self`` and ``cls``."""

    place: str
    lines: int
    parameters: int
    is_command: bool


def sources(checkout: Path, package: str) -> Iterator[Path]:
    """Iterate over a package's modules, generated ones left out."""
    files = sorted((checkout / package).rglob("*.py"))
    return (file for file in files if file.name not in GENERATED)


def at_root(checkout: Path, package: str) -> int:
    """Return how many modules lie at a package's root."""
    return len(list((checkout / package).glob("*.py")))


def functions(checkout: Path, package: str) -> Iterator[Function]:
    """Iterate over all functions and methods of a package."""
    for file in sources(checkout, package):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                yield Function(
                    f"{file.relative_to(checkout).as_posix()}:{node.name}",
                    (node.end_lineno or node.lineno) - node.lineno + 1,
                    sum(one.arg not in ("self", "cls") for one in named),
                    "terminal" in file.parts and node.name == "command",
                )


def floors(checkout: Path, package: str) -> int:
    """Return on how many floors a package's modules stand."""
    root = checkout / package
    files = {_name(root, file): file for file in sources(checkout, package)}
    imports = {name: _imported(file, files) - {name} for name, file in files.items()}
    return max(_floors(imports).values())


def _name(root: Path, file: Path) -> str:
    parts = file.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(file: Path, known: dict[str, Path]) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & known.keys()) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known.keys()
    return found


def _floors(imports: dict[str, set[str]]) -> dict[str, int]:
    """Return each module's floor: strongly connected modules (Tarjan, 1972) share one."""
    number, low, floor = dict[str, int](), dict[str, int](), dict[str, int]()
    open_: list[str] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        open_.append(name)
        for other in sorted(imports[name]):
            if other not in number:
                visit(other)
            if other not in floor:
                low[name] = min(low[name], low[other])
        if low[name] == number[name]:
            circle = open_[open_.index(name) :]
            del open_[open_.index(name) :]
            below = {other for one in circle for other in imports[one]} - set(circle)
            floor.update(dict.fromkeys(circle, 1 + max((floor[other] for other in below), default=0)))

    for name in sorted(imports):
        if name not in number:
            visit(name)
    return floor


def main(*checkouts: str) -> None:
    """Print a table of a row for each checkout and package."""
    heads = ("checkout", "package", "files at the root", "floors", "longest function", "most parameters")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")  # noqa: T201
    for checkout in map(Path, checkouts or [Path(__file__).resolve().parents[2]]):
        for package in PACKAGES:
            plain = [one for one in functions(checkout, package) if not one.is_command]
            longest = max(plain, key=lambda one: one.lines)
            most = max(plain, key=lambda one: one.parameters)
            cells = (
                checkout.name,
                package,
                at_root(checkout, package),
                floors(checkout, package),
                f"{longest.lines} ({longest.place})",
                f"{most.parameters} ({most.place})",
            )
            print(f"| {' | '.join(map(str, cells))} |")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
