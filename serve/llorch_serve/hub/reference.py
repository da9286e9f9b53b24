"""What a user writes for a repository of a hub: ``org/name``, ``org/name@revision``, ``org/name:Q4_K_M``, and
``modelscope://`` before any of them.

Input is a word of the command line; output is a :class:`Reference`. Nothing is asked of the hub here.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, replace
from typing import Final

from llorch_serve.errors import UsageError

_REFERENCE: Final = re.compile(
    r"(?P<hub>modelscope://)?(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w][\w./-]*))?(:(?P<choice>[\w][\w./-]*))?"
)
_MAX_LENGTH: Final = 500


class Hub(enum.StrEnum):
    """Where a repository is looked for."""

    HUGGING_FACE = "huggingface"
    MODELSCOPE = "modelscope"


@dataclass(frozen=True, slots=True)
class Reference:
    """A repository, at a revision, and what is chosen of it.

    revision: branch, tag or commit; None is the hub's default branch.
    choice: a quantisation such as ``Q4_K_M``, or the path of a GGUF file; None: nothing is chosen.
    """

    repository: str
    revision: str | None = None
    choice: str | None = None
    hub: Hub = Hub.HUGGING_FACE

    def __str__(self) -> str:
        hub = f"{self.hub}://" if self.hub is Hub.MODELSCOPE else ""
        at = "" if self.revision is None else f"@{self.revision}"
        return f"{hub}{self.repository}{at}{'' if self.choice is None else f':{self.choice}'}"


def parse_reference(text: str) -> Reference | None:
    """Return what ``text`` refers to, or None if it has not the form of a reference."""
    if len(text) > _MAX_LENGTH or ".." in text:
        return None
    match = _REFERENCE.fullmatch(text)
    if match is None or match["repository"].endswith((".gguf", ".safetensors")):
        return None
    hub = Hub.HUGGING_FACE if match["hub"] is None else Hub.MODELSCOPE
    return Reference(match["repository"], match["revision"], match["choice"], hub)


def with_hub(source: str, hub: Hub | None) -> str:
    """Return the source at the hub that ``--hub`` names.

    Raises UsageError if the source is no repository, or names another hub itself.
    """
    if hub is None:
        return source
    reference = parse_reference(source)
    if reference is None:
        raise UsageError(
            f"--hub {hub} is for a hub id such as org/name, and {source[:200]!r} is none; leave it out"
        )
    if reference.hub not in (Hub.HUGGING_FACE, hub):  # without a prefix none is named yet
        raise UsageError(f"{source} and --hub {hub} name two hubs; give one of them")
    return str(replace(reference, hub=hub))


def with_revision(source: str, revision: str | None) -> str:
    """Return the source at the revision that ``--revision`` gives.

    Raises UsageError if the source is no repository, or names another revision itself.
    """
    if revision is None:
        return source
    reference = parse_reference(source)
    if reference is None:
        raise UsageError(
            f"--revision {revision[:100]} is for a hub id such as org/name, and {source[:200]!r} is none; "
            "leave it out"
        )
    if reference.revision not in (None, revision):
        raise UsageError(f"{source} and --revision {revision[:100]} name two revisions; give one of them")
    changed = str(replace(reference, revision=revision))
    if parse_reference(changed) is None:
        raise UsageError(f"--revision {revision[:100]!r} is no name of a branch, tag or commit; check it")
    return changed
