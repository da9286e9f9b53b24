"""``llorch sign``: a signature beside an artifact's files, over all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from llorch_serve.terminal.console import write
from llorch_serve.terminal.requirements import require_signing


def command(
    artifact: Annotated[Path, typer.Argument(metavar="DIR", help="Artifact folder.", show_default=False)],
    private_key: Annotated[
        Path,
        typer.Option(
            "--private-key",
            metavar="KEY",
            help="Key on the curve P-256, P-384 or P-521, in PEM. LLORCH_KEY_PASSWORD opens one that is "
            "encrypted.",
            show_default=False,
        ),
    ],
) -> None:
    """Sign an artifact: model.sig in its folder says that the key's owner vouches for every file.

    The hashes of the files are compared with the manifest's first. The signature is one of OpenSSF's
    model-signing, and needs no network.

    For example:

        openssl ecparam -name prime256v1 -genkey -noout -out key.pem

        openssl ec -in key.pem -pubout -out key.pub

        llorch sign artifacts/smollm2 --private-key key.pem

        llorch serve artifacts/smollm2 --verify-signature key.pub

    """
    require_signing()
    from llorch_serve.artifact.signature import sign

    made = sign(artifact, private_key, os.environ.get("LLORCH_KEY_PASSWORD") or None)
    write(f"{made} covers every file of {artifact}\n")
