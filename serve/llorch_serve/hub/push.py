"""Put an artifact into a hub repository, with its model card, in one commit.

Input is a checked artifact; output is the commit. The hub shows all of it or nothing, and large files that it
has already are not sent again.
"""

from __future__ import annotations

from pathlib import Path

from llorch_serve.artifact.folder import MANIFEST_NAME, load_artifact
from llorch_serve.artifact.links import real_file
from llorch_serve.artifact.signed_files import CARD_NAME, SIGNATURE_NAME
from llorch_serve.errors import ArtifactError, UsageError
from llorch_serve.hub.card import MARK, Fidelity, model_card
from llorch_serve.hub.failures import hub_failures
from llorch_serve.hub.files import fetch, list_repository
from llorch_serve.hub.listing import Listing, is_inside
from llorch_serve.hub.reference import Hub, Reference


def push(
    folder: Path,
    reference: Reference,
    *,
    private: bool = False,
    licence: str | None = None,
    fidelity: Fidelity | None = None,
) -> tuple[str, bool]:
    """Return the commit's hash, and whether a card that somebody wrote was left as it is. An artifact's
    signature goes with it, and one of an earlier artifact is taken away.

    The repository is made if it does not exist; private: it is then seen by its owner alone. Raises
    ArtifactError if the artifact is damaged, HubError if the hub refuses, UsageError for a choice.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    if reference.choice is not None:
        raise UsageError(f"{reference} chooses a file, and an artifact is sent whole; leave that out")
    if reference.hub is not Hub.HUGGING_FACE:
        raise UsageError(f"{reference} is ModelScope's, and artifacts are sent to the Hugging Face hub alone")
    artifact = load_artifact(folder, verify_hashes=True)
    names = [*(entry.path for entry in artifact.manifest.files), MANIFEST_NAME]
    signed = (folder / SIGNATURE_NAME).is_file()
    if signed and SIGNATURE_NAME not in names:
        names.append(SIGNATURE_NAME)
    files: list[CommitOperationAdd | CommitOperationDelete] = []
    for name in names:
        try:
            files.append(CommitOperationAdd(name, real_file(folder / name, folder)))
        except ValueError as error:  # a name that means something else to Git or to the client
            raise _impossible(folder, name) from error
        if not is_inside(name) or files[-1].path_in_repo != name:
            raise _impossible(folder, name)
    api = HfApi()
    with hub_failures(reference):
        api.create_repo(reference.repository, private=private, exist_ok=True)
    listing = list_repository(reference)
    if not signed and listing.find(SIGNATURE_NAME) is not None:
        files.append(CommitOperationDelete(SIGNATURE_NAME))
    kept = _has_card_of_its_own(listing)
    if not kept and CARD_NAME not in names:
        card = model_card(artifact.manifest, reference.repository, licence, fidelity)
        files.append(CommitOperationAdd(CARD_NAME, card.encode()))
    with hub_failures(reference):
        commit = api.create_commit(
            reference.repository,
            files,
            commit_message=f"Artifact {artifact.manifest.fingerprint[:16]}",
            revision=reference.revision,
        )
    return commit.oid, kept


def _impossible(folder: Path, name: str) -> ArtifactError:
    return ArtifactError(
        f"{folder} lists {name[:100]!r}, which is no possible name of a file in a repository; expected a "
        "plain path such as deep/model.onnx, without .git or .cache: export the model again"
    )


def _has_card_of_its_own(listing: Listing) -> bool:
    if listing.find(CARD_NAME) is None:
        return False
    return MARK.encode() not in (fetch(listing, [CARD_NAME]) / CARD_NAME).read_bytes()
