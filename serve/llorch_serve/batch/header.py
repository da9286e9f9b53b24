"""What a batch's output was made from, kept beside it, so that answers of two kinds are never mixed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.files.durable import write_whole
from llorch_serve.files.json_errors import NOT_JSON

VERSION: Final = 1
_MAX_BYTES: Final = 16 * 2**20
_MAX_SHOWN: Final = 60


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the bytes of an output depend on.

    settings: of the run, as they go into bodies; kept beside their hash so that a mismatch can name them.
    fingerprint: of the model that answers.
    ordered: answers have the order of the input.
    """

    version: int = VERSION
    input_sha256: str
    settings_sha256: str
    settings: dict[str, Any]
    fingerprint: str
    ordered: bool

    @property
    def run_id(self) -> str:
        """What the ids of answers derive from: the same for every run that gives the same answers."""
        parts = "\0".join((self.input_sha256, self.settings_sha256, self.fingerprint))
        return hashlib.sha256(parts.encode()).hexdigest()


def make_header(input_sha256: str, settings: Mapping[str, Any], fingerprint: str, *, ordered: bool) -> Header:
    """Return the header of a run. settings: JSON values by name."""
    encoded = msgspec.json.encode(settings, order="sorted")
    return Header(
        input_sha256=input_sha256,
        settings_sha256=hashlib.sha256(encoded).hexdigest(),
        settings=msgspec.json.decode(encoded),
        fingerprint=fingerprint,
        ordered=ordered,
    )


def header_path(output: Path) -> Path:
    """Return where the header of an output lies."""
    return output.with_name(f"{output.name}.run.json")


def read_header(output: Path) -> Header | None:
    """Return the header beside an output, None where there is none. Raises ArtifactError, OSError."""
    path = header_path(output)
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(raw) > _MAX_BYTES:
        raise ArtifactError(f"{path} has more than {_MAX_BYTES} bytes and is no header of a batch")
    try:
        header = msgspec.json.decode(raw, type=Header)
    except NOT_JSON as error:
        raise ArtifactError(f"{path} is no header of a batch ({error}); {_anew(output)}") from None
    if header.version != VERSION:
        raise ArtifactError(
            f"{path} has version {header.version}, this llorch knows {VERSION}; go on with the llorch that "
            f"wrote it, or {_anew(output)}"
        )
    return header


def write_header(output: Path, header: Header) -> None:
    """Put the header beside an output. Raises OSError."""
    write_whole(header_path(output), msgspec.json.format(msgspec.json.encode(header)) + b"\n")


def refuse_mismatch(output: Path, found: Header, asked: Header) -> None:
    """Raise UsageError where the output was made from something else, naming all that differs."""
    if differences := list(_differences(found, asked)):
        raise UsageError(
            f"{output} was begun with {', and '.join(differences)}; run it as it was begun to go on, or "
            f"{_anew(output)}"
        )


def _differences(found: Header, asked: Header) -> Iterator[str]:
    if found.input_sha256 != asked.input_sha256:
        yield f"another input (SHA-256 {found.input_sha256[:12]}, now {asked.input_sha256[:12]})"
    if found.settings_sha256 != asked.settings_sha256:
        names = sorted(
            name
            for name in found.settings.keys() | asked.settings.keys()
            if found.settings.get(name) != asked.settings.get(name)
        )
        told = "; ".join(
            f"{name} {_shown(found.settings, name)}, now {_shown(asked.settings, name)}" for name in names
        )
        yield f"other settings ({told})" if told else "other settings"
    if found.fingerprint != asked.fingerprint:
        yield f"another model (fingerprint {found.fingerprint[:12]}, now {asked.fingerprint[:12]})"
    if found.ordered != asked.ordered:
        words = {True: "answers in the input's order", False: "answers as they were done"}
        yield f"{words[found.ordered]} (now {words[asked.ordered]})"


def _shown(settings: Mapping[str, Any], name: str) -> str:
    if name not in settings:
        return "not set"
    text = msgspec.json.encode(settings[name]).decode()
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _anew(output: Path) -> str:
    return f"choose another output, or remove {output.name} and what lies beside it to begin anew"
