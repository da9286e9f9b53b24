"""Scripts outside the packages, as modules that a test can call and change."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_REPOSITORY = Path(__file__).resolve().parents[3]


def load_script(place: str) -> ModuleType:
    """Return a script of the repository as a module. place: of its file, from the repository's root."""
    path = _REPOSITORY / place
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module
