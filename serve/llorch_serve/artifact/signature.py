"""Signatures of a model's folder in the format of OpenSSF's model-signing, by a key on an elliptic curve.

Input is a folder and a key; output is ``model.sig`` in it, a Sigstore bundle over the SHA-256 of every file,
or the word that every file is what was signed. The package ``model-signing`` does the cryptography, without a
network, and its own command makes and checks the same signatures.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from llorch_serve.artifact.folder import MANIFEST_NAME, MAX_MANIFEST_BYTES, is_artifact, load_artifact
from llorch_serve.artifact.links import open_inside
from llorch_serve.artifact.signed_files import (
    CARD_NAME,
    SIGNATURE_NAME,
    SignedFolder,
    files_to_cover,
)
from llorch_serve.errors import ArtifactError, ResourceError, UsageError
from llorch_serve.files.durable import write_whole
from llorch_serve.files.json_errors import NOT_JSON

MAX_SIGNATURE_BYTES: Final = 4 * 2**20
# What the package raises for a bundle that is none, and for files that are not what was signed.
_REFUSALS: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError)


class _Named(msgspec.Struct, frozen=True, rename="camel"):
    hint: Annotated[str, msgspec.Meta(min_length=1)]  # without one the package prints a warning on stdout


class _Material(msgspec.Struct, frozen=True, rename="camel"):
    public_key: _Named


class _Envelope(msgspec.Struct, frozen=True, rename="camel"):
    payload: bytes


class _Bundle(msgspec.Struct, frozen=True, rename="camel"):
    verification_material: _Material
    dsse_envelope: _Envelope


class _Serialization(msgspec.Struct, frozen=True):
    method: Literal["files"]
    hash_type: Literal["sha256"]


class _Resource(msgspec.Struct, frozen=True):
    name: str
    digest: str


class _Predicate(msgspec.Struct, frozen=True):
    serialization: _Serialization
    resources: tuple[_Resource, ...]


class _Statement(msgspec.Struct, frozen=True):
    predicate: _Predicate


def sign(folder: Path, private_key: Path, password: str | None = None) -> Path:
    """Sign an artifact, whose hashes are compared first; return the path of the signature.

    private_key: PEM, on the curve P-256, P-384 or P-521. password: of the key, if it is encrypted.
    Raises ArtifactError if the artifact is damaged, UsageError for a key that is none, ResourceError if the
    signature cannot be written.
    """
    from model_signing import signing

    listed = {entry.path: entry.sha256 for entry in load_artifact(folder).manifest.files}
    if taken := sorted(listed.keys() & {SIGNATURE_NAME, CARD_NAME}):
        raise ArtifactError(f"{folder} lists {taken[0]} as a file of the model, and no signature covers that")
    target = folder / SIGNATURE_NAME
    if target.is_symlink():
        raise ArtifactError(f"{target} is a link, and what it names is left alone; remove the link")
    with _reading_key("--private-key", private_key, "a private key"):
        secret: Any = None if password is None else password.encode()  # bytes, against the package's own hint
        signer = signing.Config().use_elliptic_key_signer(private_key=private_key, password=secret)
    hashing = _hashing(folder)
    with tempfile.TemporaryDirectory() as place:
        made = Path(place) / SIGNATURE_NAME
        try:
            signer.set_hashing_config(hashing).sign(folder, made)
            for name, sha256 in listed.items():
                if (found := hashing.made.get(name)) != sha256:
                    raise ArtifactError(
                        f"{folder / name} has SHA-256 {found} where the manifest says {sha256}; copy it again"
                    )
            write_whole(target, made.read_bytes())
        except OSError as error:
            raise ResourceError(
                f"{folder} cannot be signed ({error.strerror or error}); see that {target} may be written"
            ) from error
    return target


def check_signature(folder: Path, public_key: Path) -> SignedFolder:
    """Compare every file of a folder, an artifact or another tool's, with its signature.

    public_key: PEM. Raises ArtifactError if there is no signature, if another key made it, or if a file was
    changed, added or removed; UsageError if the key cannot be read.
    """
    from cryptography.exceptions import InvalidSignature
    from model_signing import verifying

    with _reading_key("--verify-signature", public_key, "a public key"):
        verifier = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    signature, statement = _read_signature(folder)
    signed = SignedFolder.of(folder)
    resources = {one.name: one.digest for one in statement.predicate.resources}
    # Called when the key has been found to have signed this, and before files of any size are read.
    hashing = _hashing(folder, lambda: _check_listed(folder, resources))
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / SIGNATURE_NAME  # what was looked at is what is verified
        copy.write_bytes(signature)
        try:
            verifier.set_hashing_config(hashing).verify(folder, copy)
        except InvalidSignature as error:
            raise ArtifactError(
                f"{folder / SIGNATURE_NAME} was not made by the key of {public_key}, or was altered; get the "
                "model again from whom you trust, or name the key that signed it"
            ) from error
        except _REFUSALS as error:
            raise ArtifactError(
                f"{folder} is not what the key of {public_key} signed: {str(error)[:500]}; get it again from "
                "whom you trust, or name the key that signed it"
            ) from error
    signed.check_unchanged()
    return signed


@contextlib.contextmanager
def _reading_key(flag: str, path: Path, kind: str) -> Iterator[None]:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        yield
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{flag} {path} cannot be used ({str(error)[:200]}); expected {kind} in PEM on the curve P-256, "
            "P-384 or P-521"
        ) from error


def _read_signature(folder: Path) -> tuple[bytes, _Statement]:
    """Return a signature and what it says, of the one form checked here: by a key, over whole files."""
    path = folder / SIGNATURE_NAME
    try:
        with open_inside(path, folder) as file:
            content = file.read(MAX_SIGNATURE_BYTES + 1)
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{folder} has no {SIGNATURE_NAME}, so it is not signed; get one that is, or sign it, if it "
            f"is yours, with: llorch sign {folder} --private-key KEY"
        ) from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > MAX_SIGNATURE_BYTES:
        raise ArtifactError(f"{path} has more than {MAX_SIGNATURE_BYTES} bytes, which no signature needs")
    try:
        bundle = msgspec.json.decode(content, type=_Bundle)
        return content, msgspec.json.decode(bundle.dsse_envelope.payload, type=_Statement)
    except NOT_JSON as error:
        raise ArtifactError(
            f"{path} is no signature by a key over the SHA-256 of whole files ({error}); other kinds, by "
            "certificate or by identity, are checked by model-signing's own command"
        ) from error


def _hashing(folder: Path, check: Callable[[], None] = lambda: None) -> Any:
    """Return model-signing's own hashing, of the files that are covered; links are followed as elsewhere.

    check: called before any file is hashed. The result's ``made`` has the hashes, in hex, by path.
    """
    from model_signing import hashing, manifest

    class Hashing(hashing.Config):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # it takes nothing
            self.made: dict[str, str] = {}

        def hash(self, model_path: hashing.PathLike, *, files_to_hash: Any = None) -> manifest.Manifest:
            check()
            found = super().hash(model_path, files_to_hash=files_to_cover(folder))
            self.made = {one.identifier: one.digest.digest_hex for one in found.resource_descriptors()}
            return found

    left_out = [SIGNATURE_NAME, CARD_NAME]
    return Hashing().set_allow_symlinks(allow_symlinks=True).set_ignored_paths(paths=left_out)


def _check_listed(folder: Path, resources: Mapping[str, str]) -> None:
    """Raise ArtifactError unless the signed names are those of the folder's files and of all that an artifact
    loads, and each has the size that its signed manifest says.

    resources: SHA-256 in hex by path, as they were signed.
    """
    there = {path.relative_to(folder).as_posix() for path in files_to_cover(folder)}
    more = there - {SIGNATURE_NAME, CARD_NAME} - resources.keys()
    less = resources.keys() - there
    if more or less:
        what = f"has {min(more)}, which its" if more else f"has no {min(less)}, which its"
        does = "does not cover" if more else "covers"
        raise ArtifactError(f"{folder} {what} signature {does}; get it again from whom you trust")
    if not is_artifact(folder):
        return
    with open_inside(folder / MANIFEST_NAME, folder) as file:
        if hashlib.sha256(file.read(MAX_MANIFEST_BYTES)).hexdigest() != resources.get(MANIFEST_NAME):
            raise ArtifactError(
                f"{MANIFEST_NAME} of {folder} is not what was signed; get it again from whom you trust"
            )
    if left := sorted({entry.path for entry in load_artifact(folder).manifest.files} - resources.keys()):
        raise ArtifactError(
            f"the signature of {folder} leaves out {left[0]}; expected all files; ask who signed it "
            "to sign them with llorch sign"
        )
