"""Children search no folder that nobody has named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llorch_serve.python_child import (
    child_environment,
    foreign_code_command,
    foreign_module_command,
    module_command,
    reset,
    set_meanwhile,
)


@pytest.mark.parametrize("form", ["{0}", "{0}:", "{0}::/nowhere", ""])
@pytest.mark.parametrize("kind", ["module", "foreign module", "foreign code"])
def test_an_empty_entry_of_pythonpath_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, form: str
) -> None:
    """As PYTHONPATH=/folder:$PYTHONPATH leaves one, where it was not set."""
    named, here = tmp_path / "named", tmp_path / "here"
    for folder in (named, here):
        folder.mkdir()
    (here / "planted.py").write_text("print('planted')")
    (named / "asked.py").write_text("try: import planted\nexcept ImportError: print('not found')")
    monkeypatch.setenv("PYTHONPATH", (form or ":{0}").format(named).replace(":", os.pathsep))
    command = {
        "module": module_command(sys.executable, "asked"),
        "foreign module": foreign_module_command(sys.executable, "asked"),
        "foreign code": foreign_code_command(sys.executable, "import asked"),
    }[kind]
    found = subprocess.run(
        command, cwd=here, env=child_environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    assert found.stdout == "not found\n"


@pytest.mark.parametrize("before", [None, "mine"])
def test_what_is_set_meanwhile_is_not_for_children(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "LLORCH_TEST_MEANWHILE"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    for value in ("1", "2"):
        set_meanwhile(name, value)
        assert os.environ[name] == value
        assert child_environment().get(name) == before
        assert child_environment(**{name: "asked"})[name] == "asked"
    reset(name)
    assert os.environ.get(name) == before
