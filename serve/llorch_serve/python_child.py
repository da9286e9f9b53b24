"""Command lines and environments of Python processes that are started: they import nothing from the current
folder.

``python -m`` and ``python -c`` put the current folder before everything else that is searched for modules.
That is often a model's folder, which may hold a ``json.py`` of whoever made it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import MutableMapping
from typing import Final

# For interpreters older than 3.11, which know neither -P nor PYTHONSAFEPATH: with -c, an empty entry is the
# current folder.
_SAFE: Final = "import sys; sys.path[:] = [entry for entry in sys.path if entry]\n"
_RUN_MODULE: Final = (
    _SAFE + 'import runpy; runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)'
)

_LOCK: Final = threading.Lock()
_BEFORE: Final[dict[str, str | None]] = {}  # of variables that are set for a while: what they were


def set_meanwhile(name: str, value: str) -> None:
    """Set a variable for this process alone, until :func:`reset` is called: children get what it was."""
    with _LOCK:
        _BEFORE.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def reset(name: str) -> None:
    """Give a variable that :func:`set_meanwhile` has set what it was before."""
    with _LOCK:
        _put(os.environ, name, _BEFORE.pop(name))


def _put(environment: MutableMapping[str, str], name: str, value: str | None) -> None:
    if value is None:
        environment.pop(name, None)
    else:
        environment[name] = value


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
    safely. What is set meanwhile is not in it.
    """
    with _LOCK:
        found = dict(os.environ)
        for name, value in _BEFORE.items():
            _put(found, name, value)
    found |= {"PYTHONSAFEPATH": "1", **changes}
    if "PYTHONPATH" in found:
        # An empty entry is the current folder whatever flags say, and is made by
        # PYTHONPATH=/folder:$PYTHONPATH where nothing was set.
        found["PYTHONPATH"] = os.pathsep.join(filter(None, found["PYTHONPATH"].split(os.pathsep)))
    return found
