"""The size of rooms and functions, so that what was sorted once stays sorted."""

from __future__ import annotations

from pathlib import Path

import pytest

from measure.house import PACKAGES, Function, at_root, floors, functions

REPOSITORY = Path(__file__).resolve().parents[2]
MOST_AT_ROOT = 8
MOST_LINES = 60
MOST_PARAMETERS = 10


@pytest.mark.parametrize("package", PACKAGES)
def test_few_modules_lie_at_a_packages_root(package: str) -> None:
    assert at_root(REPOSITORY, package) <= MOST_AT_ROOT


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_short_and_take_few_parameters(package: str) -> None:
    plain = [one for one in functions(REPOSITORY, package) if not one.is_command]
    assert [one for one in plain if one.lines > MOST_LINES] == []
    assert [one for one in plain if one.parameters > MOST_PARAMETERS] == []


def test_what_is_counted(tmp_path: Path) -> None:
    root = tmp_path / "serve" / "llorch_serve"
    (root / "room").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "low.py": "def f(self, a, *, b):\n    def g():\n        pass\n",
        "middle.py": "from llorch_serve.low import f\nimport llorch_serve.room.other\n",
        "room/__init__.py": "",
        "room/other.py": "def late():\n    from llorch_serve import middle\n",
        "top.py": "from llorch_serve.room import other\n",
        "worker_pb2.py": "import llorch_serve.top\n",
    }.items():
        (root / name).write_text(text)
    package = "serve/llorch_serve"
    assert at_root(tmp_path, package) == 5
    assert floors(tmp_path, package) == 3  # low; middle and other, which import each other; top
    assert list(functions(tmp_path, package)) == [
        Function(f"{package}/low.py:f", 3, 2, is_command=False),
        Function(f"{package}/low.py:g", 2, 0, is_command=False),
        Function(f"{package}/room/other.py:late", 2, 0, is_command=False),
    ]
