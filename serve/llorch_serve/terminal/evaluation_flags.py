"""Flags of ``llorch eval``: what is evaluated, and what must hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from llorch_serve.errors import UsageError
from llorch_serve.terminal.groups import FlagGroup

if TYPE_CHECKING:
    from llorch_serve.evaluation.perplexity import NamedText
    from llorch_serve.evaluation.tasks import TaskChoice

SAMPLE: Final = "sample"
DEFAULT_WINDOW: Final = 2048
_MOST_BYTES: Final = 2**28


class TextFlags(FlagGroup, frozen=True):
    """Texts whose perplexity is measured."""

    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A text in UTF-8 whose perplexity is measured; may be repeated. sample: the English text "
            "that comes with llorch, which is also read where neither --text nor --tasks is given.",
            show_default=False,
        ),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens that the model reads at once. Default: {DEFAULT_WINDOW}, or its context if that is "
            f"less.",
            show_default=False,
        ),
    ] = None
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that each window but the first predicts, the others being its context. Default: "
            "all, as lm-eval has it.",
            show_default=False,
        ),
    ] = None

    def read(self, *, tasks: bool) -> list[NamedText]:
        """Return the texts. Raises UsageError for a file that is no text, and for flags without a text."""
        from llorch_serve.bench.workload import sample_text
        from llorch_serve.evaluation.perplexity import NamedText

        names = self.text or ([] if tasks else [SAMPLE])
        if not names and (flags := self.given()):
            raise UsageError(f"{flags[0]} has no effect without a text; add --text FILE, or leave it out")
        if len(set(names)) < len(names):
            raise UsageError("--text names a file twice; once is enough")
        return [NamedText(name, sample_text() if name == SAMPLE else _read(name)) for name in names]

    def lengths(self, context: int) -> tuple[int, int]:
        """Return window and stride for a model of so much context. Raises UsageError if they do not fit."""
        window = min(DEFAULT_WINDOW, context) if self.window is None else self.window
        if window > context:
            raise UsageError(
                f"--window is {window} and the model's context {context} tokens; expected at most that"
            )
        stride = window if self.stride is None else self.stride
        if stride > window:
            raise UsageError(f"--stride is {stride}; expected at most --window, {window}")
        return window, stride


class TaskFlags(FlagGroup, frozen=True):
    """Tasks of lm-eval."""

    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Tasks of lm-eval, groups or tags, by name. Needs: pip install 'llorch[eval]'.",
            show_default=False,
        ),
    ] = None
    task_folder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Tasks of your own as YAML files, and data sets: files that those name, or ORG/NAME as the "
            "hub has it. Python in it is run. May be repeated.",
            show_default=False,
        ),
    ] = None
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Only the first N questions of each task, or below 1 that share of them.",
            show_default=False,
        ),
    ] = None
    fewshot: Annotated[
        int | None,
        typer.Option(
            min=0, help="Examples before each question. Default: as the task says.", show_default=False
        ),
    ] = None
    chat_template: Annotated[
        bool,
        typer.Option(
            "--chat-template",
            help="Ask in a conversation, by the model's own template, with examples as earlier turns.",
        ),
    ] = False

    def choice(self) -> TaskChoice | None:
        """Return what is asked for; None: no tasks. Raises UsageError for what cannot be."""
        from llorch_serve.evaluation.tasks import TaskChoice

        if self.tasks is None:
            for flag in self.given():
                raise UsageError(f"{flag} has no effect without --tasks; add them, or leave it out")
            return None
        names = tuple(dict.fromkeys(name.strip() for name in self.tasks.split(",")))
        if not all(names):
            raise UsageError(f"--tasks is {self.tasks!r}; expected names separated by commas")
        for folder in self.task_folder or ():
            if not folder.is_dir():
                raise UsageError(f"--task-folder is {folder}, which is no folder; expected one")
        whole = self.limit is not None and self.limit >= 1 and self.limit.is_integer()
        if self.limit is not None and not (whole or 0 < self.limit < 1):
            raise UsageError(f"--limit is {self.limit:g}; expected a whole number, or a share below 1")
        folders = tuple(folder.resolve() for folder in self.task_folder or ())
        return TaskChoice(
            names=names,
            folders=folders,
            limit=self.limit,
            fewshot=self.fewshot,
            chat_template=self.chat_template,
        )


class GateFlags(FlagGroup, frozen=True):
    """What must hold, or the command exits with 1."""

    at_least: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE=NUMBER",
            help="Exit with 1 if a figure is less, like arc_easy.acc=0.6; may be repeated.",
            show_default=False,
        ),
    ] = None
    at_most: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE=NUMBER",
            help="Exit with 1 if a figure is more, like perplexity=25 or kl=0.01; may be repeated.",
            show_default=False,
        ),
    ] = None
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Compare with what llorch eval --json wrote for another model.",
            show_default=False,
        ),
    ] = None
    fail_if_worse: Annotated[
        bool,
        typer.Option(
            "--fail-if-worse", help="With --baseline: exit with 1 if a figure is worse beyond noise."
        ),
    ] = False


def _read(name: str) -> str:
    path = Path(name)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"--text {name} has over {_MOST_BYTES} bytes; cut it into files")
        found = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {name} cannot be read as UTF-8 text: {error}") from error
    if not found:
        raise UsageError(f"--text {name} is empty; expected a text")
    return found
