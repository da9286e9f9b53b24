"""``llorch pull``: a finished artifact from a hub repository, into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.errors import UsageError
from llorch_serve.hub.reference import Hub, parse_reference, with_hub, with_revision
from llorch_serve.terminal.console import write, write_json
from llorch_serve.terminal.requirements import require_hub_client, require_signing
from llorch_serve.terminal.target import VerifySignature


def command(
    repository: Annotated[
        str,
        typer.Argument(help="Hub repository with an artifact: org/name or org/name@REV.", show_default=False),
    ],
    folder: Annotated[Path, typer.Argument(help="The folder that it becomes.", show_default=False)],
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="REV",
            help="A branch, a tag or a commit, as in org/name@REV. Default: the main branch.",
            show_default=False,
        ),
    ] = None,
    hub: Annotated[
        Hub | None,
        typer.Option(
            help="Where it is, as in modelscope://org/name. Default: huggingface.", show_default=False
        ),
    ] = None,
    verify_signature: VerifySignature = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Fetch an artifact from a model hub.

    Every file is compared with the manifest's hash. A call that is interrupted leaves no artifact; the next
    one goes on where it stopped. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE have their usual meaning.

    For example:

        llorch pull my-org/smollm2-onnx artifacts/smollm2

        llorch pull my-org/smollm2-onnx@v2 artifacts/smollm2-v2

        llorch pull my-org/smollm2-onnx artifacts/smollm2 --verify-signature my-org.pub

    """
    reference = parse_reference(with_hub(with_revision(repository, revision), hub))
    if reference is None:
        raise UsageError(f"{repository[:200]!r} is no hub repository; expected org/name or org/name@REV")
    if reference.hub is Hub.HUGGING_FACE:
        require_hub_client()
    if verify_signature is not None:
        require_signing()
    from llorch_serve.hub.pull import pull

    artifact = pull(reference, folder, public_key=verify_signature)
    size = sum(entry.bytes for entry in artifact.manifest.files)
    if as_json:
        write_json({"folder": str(folder), "fingerprint": artifact.manifest.fingerprint, "bytes": size})
    else:
        what = f"{folder} holds {artifact.manifest.model_id}, {size / 1e6:.1f} MB"
        write(f"{what}, every hash as its manifest says\n")
