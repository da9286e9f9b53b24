"""``ci/environment`` with interpreters that fail: nothing is called installed which is not, however its
functions are called.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parent.parent.parent / "ci"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="ci/ is written for bash")

# Makes environments, installs unless a file says no, and tells that it was asked.
PYTHON = """#!/bin/sh
here=$(dirname "$(dirname "$0")")
echo "$2" >>'{log}'
[ ! -e '{fails}'-"$2" ] || exit 7
if [ "$2" = venv ]; then
    for folder; do :; done
    mkdir -p "$folder/bin"
    cp "$0" "$folder/bin/python"
fi
"""


class Room:
    """A repository with ci/environment, a fake interpreter, and no more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ci").mkdir()
        shutil.copy(CI / "environment", folder / "ci")
        for name in ("pyproject.toml", "ci/constraints.txt"):
            (folder / name).touch()
        python = folder / "python"
        python.write_text(PYTHON.format(log=folder / "log", fails=folder / "fails"))
        python.chmod(0o755)

    def run(self, body: str) -> subprocess.CompletedProcess[str]:
        """Run a script as those of ci/ begin."""
        script = f"set -euo pipefail\nPYTHON=$PWD/python\nunset VIRTUAL_ENV\n. ci/environment\n{body}\n"
        return subprocess.run(["bash", "-c", script], cwd=self.folder, capture_output=True, text=True)

    def asked(self) -> list[str]:
        """Return the modules that interpreters were asked to run since the last call."""
        log = self.folder / "log"
        found = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return found


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


CALLS = {
    "substitution": 'python=$(beside tool that==1)\necho "got $python"',
    "default": 'python=${NONE:-$(beside tool that==1)}\necho "got $python"',
    "plain": "beside tool that==1\necho got",
    "condition": "if beside tool that==1; then echo got; else exit 9; fi",
    "prepare": "prepare cpu\necho got",
    "prepare in a condition": "prepare cpu || exit 9\necho got",
}


@pytest.mark.parametrize("step", ["venv", "pip"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_fails_fails_the_script_and_is_tried_again(room: Room, call: str, step: str) -> None:
    (room.folder / f"fails-{step}").touch()
    for _ in range(2):
        done = room.run(call)
        assert done.returncode != 0, done
        assert "got" not in done.stdout
        assert room.asked()[-1] == step
    (room.folder / f"fails-{step}").unlink()
    done = room.run(call)
    assert (done.returncode, "got" in done.stdout) == (0, True), done
    assert room.asked()[-1] == "pip"
    assert room.run(call).returncode == 0
    assert room.asked() == []


FUNCTION = re.compile(r"^(\w+)\(\) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
SAFE = re.compile(
    r"\|\| (return|exit)|^(local|if|elif|else|fi|for|done|echo|export|printf|return|shift|set|#)"
    r"|^\w+=([^(]*|\((?!.*\$\().*)$"
)


def test_functions_of_scripts_do_not_rely_on_set_e() -> None:
    """Each command of a function either ends the function where it fails, or cannot sensibly fail."""
    seen = 0
    for script in sorted(path for path in CI.iterdir() if path.is_file() and path.suffix == ""):
        for name, body in FUNCTION.findall(script.read_text()):
            for line in filter(None, map(str.strip, body.split("\n"))):
                seen += 1
                assert SAFE.search(line), f"ci/{script.name}: {name}: {line}: add '|| return'"
    assert seen > 20


def test_no_script_hides_a_failure_inside_another_command() -> None:
    """``a "$(b)"`` goes on where ``b`` fails; an assignment of its own ends the script."""
    hidden = re.compile(r"(?<!=)\"\$\((beside|ci/|swiftshader)|^\s*export \w+=[^ ]*\$\(")
    for script in sorted(path for path in CI.iterdir() if path.is_file() and path.suffix == ""):
        for line in script.read_text().splitlines():
            assert not hidden.search(line), f"ci/{script.name}: {line.strip()}"
