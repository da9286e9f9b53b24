"""The operating system's refusals while an artifact is written, in our words."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from llorch_serve.errors import ArtifactError, ResourceError


@contextlib.contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """Turn the operating system's refusals into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                f"the disk of {output} is full ({error.strerror}); free some space or choose another --output"
            ) from error
        raise ArtifactError(
            f"cannot write {output}: {error.strerror or error}; check the path and its permissions"
        ) from error
