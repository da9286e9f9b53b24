"""Arguments that several commands share, so that they read and mean the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

ModelDir = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR",
        help="Artifact folder, one made by onnxruntime-genai or Optimum, or a source (GGUF file, Hugging Face folder, hub id) that is exported once into a cache.",
        show_default=False,
    ),
]
Model = Annotated[str | None, typer.Option("--model", help="The same as DIR.", show_default=False)]
Connect = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Use a running worker instead.", show_default=False),
]
Wait = Annotated[
    float | None,
    typer.Option(min=0, help="With --connect: seconds to wait for a starting worker.", show_default=False),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        help="Tokens per sequence. Default: the model's, or less if memory is short.", show_default=False
    ),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Default: all CPUs allowed.", show_default=False)]
