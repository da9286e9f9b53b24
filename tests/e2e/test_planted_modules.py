"""Commands that run in a folder which holds a Python file for every module there is: none of them is
imported.

Such a folder stands for a model's, which may hold whatever its maker put there.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llorch_export.optimum.interpreter import find_optimum, run_optimum
from llorch_serve import python_child
from llorch_serve.errors import ArtifactError
from llorch_serve.python_child import foreign_code_command, foreign_module_command
from llorch_serve.structured.examiner import Examiner
from support.harness.processes import PATIENCE_S, Outcome, environment

REPOSITORY = Path(__file__).resolve().parent.parent.parent
# As the script that a wheel installs: it puts its own folder, not the current one, before others.
SCRIPT = ("-P", "-c", "from llorch_serve.cli import main; main()")
MODULE = ("-m", "llorch_serve")

PLANTED = """
with open({marker!r}, "a") as marker:
    marker.write({name!r} + "\\n")
raise ImportError("the planted " + {name!r})
"""


def module_names() -> set[str]:
    """Every module that a child can import by one name: of the standard library, and of whatever is
    installed.
    """
    installed = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
    # Optimum is not installed here, but it is what its interpreter runs.
    return {*sys.stdlib_module_names, *installed, "optimum", "sitecustomize", "usercustomize"}


class Plot:
    """A folder with planted modules, and what was imported of them."""

    def __init__(self, folder: Path, marker: Path, names: set[str]) -> None:
        self.folder = folder
        self.marker = marker
        for name in names:
            (folder / f"{name}.py").write_text(PLANTED.format(marker=str(marker), name=name))

    def imported(self) -> list[str]:
        """Return what has been imported, in order."""
        return self.marker.read_text().split() if self.marker.exists() else []

    def run(self, start: tuple[str, ...], *arguments: object, **variables: str | Path) -> Outcome:
        """Run llorch in the folder."""
        done = subprocess.run(
            [sys.executable, *start, *map(str, arguments)],
            capture_output=True,
            check=False,
            encoding="utf-8",
            stdin=subprocess.DEVNULL,
            cwd=self.folder,
            env=environment(**variables),
            timeout=PATIENCE_S,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Plot:
    """Modules planted once for all tests that only need a current folder of that kind."""
    folder = tmp_path_factory.mktemp("planted") / "here"
    folder.mkdir()
    return Plot(folder, folder.parent / "imported", module_names())


@pytest.fixture
def here(planted: Plot, monkeypatch: pytest.MonkeyPatch) -> Plot:
    """Modules planted in this process's current folder."""
    planted.marker.unlink(missing_ok=True)
    monkeypatch.chdir(planted.folder)
    return planted


def test_a_planted_module_is_found_where_nothing_is_done_about_it(here: Plot) -> None:
    done = subprocess.run([sys.executable, "-c", "import json"], capture_output=True, check=False)
    assert done.returncode != 0
    assert here.imported()


# llorch starts Pythons of its own for three things: the command that measures, the exporter, and trying
# grammars.


def test_a_command_and_the_child_that_measures_beside_an_artifact(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "artifact")
    plot = Plot(tmp_path / "artifact", tmp_path / "imported", module_names())
    flags = ("--tests", "decode", "--max-tokens", "4", "--streams", "1", "--repeat", "1", "--json")
    outcome = plot.run(SCRIPT, "bench", ".", *flags)
    assert plot.imported() == [], outcome.stderr
    assert outcome.code == 0, outcome


def test_a_command_and_the_child_that_exports_beside_a_source(tiny_source: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_source, tmp_path / "source")
    plot = Plot(tmp_path / "source", tmp_path / "imported", module_names())
    flags = ("--prompt-ids", "7,8,9", "--max-tokens", "1", "--ignore-eos", "--json")
    outcome = plot.run(SCRIPT, "generate", ".", *flags, LLORCH_CACHE=tmp_path / "cache")
    assert plot.imported() == [], outcome.stderr
    assert outcome.code == 0, outcome


def test_python_m(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    # Python's own `-m` imports several of the standard library's before any code of ours; only `-P`, or the
    # script, keeps those from the folder.
    plot = Plot(tmp_path / "here", tmp_path / "imported", module_names() - sys.stdlib_module_names)
    outcome = plot.run(MODULE, "inspect", tiny, "--json")
    assert plot.imported() == [], outcome.stderr
    assert outcome.code == 0, outcome


def test_the_process_that_tries_grammars(here: Plot) -> None:
    pytest.importorskip("llguidance")
    examiner = Examiner(512, {})
    try:
        assert examiner.refusal('start: "a"') is None
    finally:
        examiner.close()
    assert here.imported() == []


def test_the_interpreter_for_optimum(here: Plot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "packages" / "optimum" / "exporters" / "onnx"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import json, subprocess, sys, torch_stand\n"
        "subprocess.run([sys.executable, '-c', 'import json'], check=True)\n"
        "sys.exit('said ' + json.dumps(sys.argv[1:5]))\n"
    )
    (tmp_path / "packages" / "torch_stand.py").touch()
    metadata = tmp_path / "packages" / "optimum_onnx-0.1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: optimum-onnx\nVersion: 0.1.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    optimum = find_optimum(sys.executable)
    assert optimum.versions["optimum-onnx"] == "0.1.0"
    with pytest.raises(ArtifactError, match=re.escape('said ["--model", "model", "--task"')):
        run_optimum(optimum, Path("model"), Path("out"))
    assert here.imported() == []


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_interpreters_that_do_not_know_the_flag_run_safely(
    here: Plot, monkeypatch: pytest.MonkeyPatch, safe_path: str
) -> None:
    """Without a variable that makes Python safe, as with one that was too old for it."""
    monkeypatch.setenv("PYTHONSAFEPATH", safe_path)
    for command in (
        foreign_code_command(sys.executable, "import json, sys; print(json.dumps(sys.argv))"),
        foreign_module_command(sys.executable, "platform", "--nothing"),
    ):
        assert not {"-P", "-I"}.intersection(command)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert here.imported() == []


def starts_of_python(tree: ast.AST) -> list[int]:
    """Return the lines where a list or tuple begins the command line of a Python by hand."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.List | ast.Tuple)
        and len(node.elts) > 1
        and isinstance(node.elts[1], ast.Constant)
        and node.elts[1].value in ("-m", "-c")
        and not isinstance(node.elts[0], ast.Constant)
    ]


def test_command_lines_of_pythons_are_made_in_one_place() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for folder in ("export", "serve", "ci", "examples")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if path != Path(python_child.__file__).resolve()
        if ('"-m"' in (text := path.read_text(encoding="utf-8")) or '"-c"' in text)
        for line in starts_of_python(ast.parse(text))
    ]
    assert found == []
    assert starts_of_python(ast.parse('[sys.executable, "-m", "a"]')) == [1]
