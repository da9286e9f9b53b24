"""Command lines and environments of Python processes that are started: they import nothing from the current
folder.

``python -m`` and ``python -c`` put the current folder before everything else that is searched for modules.
That is often a model's folder, which may hold a ``json.py`` of whoever made it.
"""

from __future__ import annotations

import os
from typing import Final

# For interpreters older than 3.11, which know neither -P nor PYTHONSAFEPATH: with -c, an empty entry is the
# current folder.
_SAFE: Final = "import sys; sys.path[:] = [entry for entry in sys.path if entry]\n"
_RUN_MODULE: Final = (
    _SAFE + 'import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of ours; ``python`` is this interpreter, or one that has
    llorch.
    """
    return [python, "-P", "-m", module, *arguments]


def foreign_module_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module in an interpreter of the user's, which may be of any version
    of Python 3.
    """
    return [python, "-c", _RUN_MODULE, module, *arguments]


def foreign_code_command(python: str, code: str) -> list[str]:
    """Return the command line that runs code in an interpreter of the user's, which may be of any version of
    Python 3.
    """
    return [python, "-c", _SAFE + code]


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with changes, such that whatever Python a child starts searches as
    safely.
    """
    found = {**os.environ, "PYTHONSAFEPATH": "1", **changes}
    if "PYTHONPATH" in found:
        # An empty entry is the current folder whatever flags say, and is made by
        # PYTHONPATH=/folder:$PYTHONPATH where nothing was set.
        found["PYTHONPATH"] = os.pathsep.join(filter(None, found["PYTHONPATH"].split(os.pathsep)))
    return found
