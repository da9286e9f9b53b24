"""``llorch embed``: the vectors of texts, from an artifact in this process or from a running worker."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from llorch_serve.config import EngineConfig
from llorch_serve.errors import UsageError
from llorch_serve.requests import EmbedRequest, TextEmbedding, TextPrompt
from llorch_serve.terminal.access import WorkerFlags
from llorch_serve.terminal.console import write
from llorch_serve.terminal.generators import open_generator
from llorch_serve.terminal.groups import composed, only
from llorch_serve.terminal.session_flags import ProviderFlags, SessionFlags
from llorch_serve.terminal.target import ModelFlags

_AT_ONCE = 256  # texts of one request


@composed
def command(
    model: ModelFlags,
    worker: WorkerFlags,
    text: Annotated[
        list[str] | None, typer.Option(help="A text; may be repeated.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A text in each line; -: standard input.", show_default=False),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(
            help="The first so many numbers of each vector, for models that were trained for it.",
            show_default=False,
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut texts that are longer than the context; else refuse them.")
    ] = False,
    *,
    session: Annotated[SessionFlags, only("max_context")],
    threads: Annotated[ProviderFlags, only("threads")],
) -> None:
    """Print the vector of each text as a line of JSON, with its index and how many tokens it has.

    For example:

        llorch embed artifacts/smollm2-embed --text "Once upon a time" --text "The end"

        llorch embed artifacts/smollm2-embed --file texts.txt

    """
    texts = _texts(text, file)

    def config() -> EngineConfig:
        return EngineConfig(session=session.config(threads, slots=1))

    local = [*session.given(), *threads.given()]
    with open_generator(model, worker, local, config, embeds=True) as generator:
        for start in range(0, len(texts), _AT_ONCE):
            part = tuple(map(TextPrompt, texts[start : start + _AT_ONCE]))
            cut = -1 if truncate else None
            request = EmbedRequest(str(uuid.uuid4()), part, dimensions, truncate_prompt_tokens=cut)
            for index, found in enumerate(generator.embed(request), start):
                write(msgspec.json.encode(_document(index, found)).decode() + "\n")


def _texts(given: list[str] | None, file: Path | None) -> list[str]:
    """Return the texts to embed. Raises UsageError for none, or a file that is no text."""
    if (given is None) == (file is None):
        what = "neither" if given is None else "both"
        raise UsageError(f"{what} of --text and --file given; expected one of them")
    if file is None:
        assert given is not None
        return given
    try:
        raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        read = raw.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--file {file} cannot be read as UTF-8 text: {error}") from error
    if not read:
        raise UsageError(f"--file {file} is empty; expected a text in each line")
    return read.removesuffix("\n").split("\n")  # other ends of lines, as U+2028, may stand in a text


def _document(index: int, found: TextEmbedding) -> dict[str, Any]:
    return {"index": index, "token_count": found.token_count, "embedding": found.values.tolist()}
