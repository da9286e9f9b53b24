"""Where the questions of earlier chats are kept for the arrow keys: one file that its user alone can read."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def history_file() -> Path:
    """Return the path of the file under the user's folder of state (XDG)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # A relative path is to be ignored, says the specification.
    folder = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return folder / "llorch" / "chat_history"


def private_file(path: Path) -> Path:
    """Make a file, and folders to it, that nobody else can read; narrow the rights of one that is there.

    Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if sys.platform == "win32":  # a user's own folder is private there, and files take its rights
        path.touch()
    else:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    return path
