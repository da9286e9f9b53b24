"""The model card of an artifact: what a reader of the repository needs to know, from the manifest alone.

Input is a manifest and, where there is one, a report of ``llorch verify --json``; output is ``README.md``
with the front matter that hubs read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Final

import msgspec

from llorch_serve.artifact.manifest import Manifest
from llorch_serve.errors import UsageError
from llorch_serve.files.json_errors import NOT_JSON

MARK: Final = "<!-- written by llorch push -->"
_LICENCE_FILE: Final = re.compile(r"(LICEN[CS]E|COPYING)\b.*", re.IGNORECASE)
_MAX_REPORT_BYTES: Final = 2**20


class Fidelity(msgspec.Struct, frozen=True):
    """What ``llorch verify --json`` found: divergence in nats, its limit, and against what."""

    kl: Annotated[float, msgspec.Meta(ge=0)]
    top1: Annotated[float, msgspec.Meta(ge=0, le=1)]
    limit: float
    tokens: int
    text: str
    oracle: str
    same_source: bool


def read_fidelity(path: Path) -> Fidelity:
    """Read a report. Raises UsageError if it is none."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(_MAX_REPORT_BYTES), type=Fidelity)
    except OSError as error:
        raise UsageError(f"--fidelity {path} cannot be read: {error.strerror or error}") from error
    except NOT_JSON as error:
        raise UsageError(
            f"--fidelity {path} is no report of a comparison ({error}); write one with: llorch verify "
            f"ARTIFACT --against SOURCE --json > FILE"
        ) from error


def model_card(manifest: Manifest, repository: str, licence: str | None, fidelity: Fidelity | None) -> str:
    """Return the text of ``README.md``. licence: the hub's name of it, as ``apache-2.0``."""
    parts = [
        _front_matter(manifest, licence),
        f"# {_plain(manifest.model_id)}\n\n{MARK}\n",
        f"An ONNX Runtime artifact of llorch, for the target {manifest.target}; it needs onnxruntime "
        f"{manifest.min_onnxruntime} or later.\n",
        f"```console\n$ llorch pull {repository} model\n$ llorch serve model\n```\n",
        _section("Recipe", _recipe(manifest)),
        _section("Fidelity", _fidelity(manifest, fidelity)),
        _section("Provenance", _provenance(manifest)),
        _section("Files", {entry.path: f"SHA-256 {entry.sha256}" for entry in manifest.files}),
    ]
    return "\n".join(parts)


def _front_matter(manifest: Manifest, licence: str | None) -> str:
    """Return the front matter; every value is a JSON string, which YAML reads as what it is."""
    fields: dict[str, object] = {
        "library_name": "onnx",
        "pipeline_tag": "text-generation",
        "tags": ["onnx", "llorch"],
    }
    if isinstance(manifest.source.repository, str) and not isinstance(manifest.source.hub, str):
        fields["base_model"] = manifest.source.repository
    named = [entry.path for entry in manifest.files if _LICENCE_FILE.fullmatch(entry.path)]
    if licence is not None:
        fields["license"] = licence
    elif named:
        fields |= {"license": "other", "license_name": "of-the-source", "license_link": named[0]}
    lines = [f"{name}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---", ""])


def _recipe(manifest: Manifest) -> dict[str, object]:
    recipe: dict[str, object] = msgspec.to_builtins(manifest.recipe)
    return {name: value for name, value in recipe.items() if value not in (None, [], (), False)}


def _fidelity(manifest: Manifest, fidelity: Fidelity | None) -> dict[str, object]:
    limit: dict[str, object] = {"limit of the recipe": f"{manifest.recipe.kl_limit:g} nats"}
    if fidelity is None:
        return {**limit, "measured": "not stated with this upload"}
    return {
        "KL divergence": f"{fidelity.kl:.3g} nats",
        "equal likeliest tokens": f"{fidelity.top1:.2%}",
        "measured on": f"{fidelity.tokens} tokens of {fidelity.text} text, against {fidelity.oracle}",
        **limit,
    }


def _provenance(manifest: Manifest) -> dict[str, object]:
    source: dict[str, object] = msgspec.to_builtins(manifest.source)
    return {
        **{f"source {name}": value for name, value in source.items() if value is not None},
        "artifact fingerprint": manifest.fingerprint,
        **{f"made with {name}": version for name, version in manifest.versions.items()},
    }


def _section(title: str, rows: dict[str, object]) -> str:
    lines = [f"| {_plain(name)} | {_plain(value)} |" for name, value in rows.items()]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines, ""])


def _plain(value: object) -> str:
    """Return a value as text of a table's cell: a stranger's names make no markup."""
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"([|<>`\[\]*\\])", r"\\\1", " ".join(text.split()))
