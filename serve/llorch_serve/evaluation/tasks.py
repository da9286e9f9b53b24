"""lm-eval's tasks, run on our models: lm-eval as a library words the questions and counts; the model answers.

lm-eval is imported when tasks are run, and by nothing else in llorch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llorch_serve.errors import LlorchError, UsageError
from llorch_serve.evaluation.schema import TaskResult
from llorch_serve.evaluation.scores import ModelScores
from llorch_serve.evaluation.task_results import task_result

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

SEED: Final = 1234  # lm-eval's own for few-shot examples and numpy
REDRAWS: Final = 1000  # of a bootstrapped standard error


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChoice:
    """Which tasks, and how they are asked.

    names: of tasks, groups or tags. folders: with further tasks and data. limit: questions of each, or a
        share below 1. fewshot: examples before each question; None: the task's own number.
    chat_template: ask in a conversation, examples as its earlier turns.
    """

    names: tuple[str, ...]
    folders: tuple[Path, ...] = ()
    limit: float | None = None
    fewshot: int | None = None
    chat_template: bool = False


@dataclass(slots=True)
class LoadedTasks:
    """Tasks with their data. notices: which flags had no effect on which of them.

    drawn: the states of Python's and numpy's generators of random numbers, after tasks had drawn from them.
    """

    made: dict[str, Any]
    drawn: tuple[Any, Any]
    notices: list[str] = field(default_factory=list)


def load_tasks(choice: TaskChoice) -> LoadedTasks:
    """Find tasks and read their data. Needs no model.

    Raises UsageError for a task that is not there or cannot be read, HubError for data that is not.
    """
    _prepare()
    from llorch_serve.evaluation.data_sets import DataSets

    data = DataSets(choice.folders)
    with contextlib.redirect_stdout(sys.stderr), data.found(), _drawing() as drawn:
        manager = _manager(choice)
        made = [_load(manager, name, data) for name in choice.names]
        try:
            tasks = manager.load([one for part in made for one in part])
        except ValueError as error:
            raise UsageError(f"--tasks {','.join(choice.names)}: {error}") from error
        after = drawn()
    loaded = LoadedTasks(dict(tasks), after)
    for name, task in tasks["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UsageError(
                f"the task {name} runs code that the model writes, which llorch eval does not do; leave it "
                f"out, or run it with lm-eval itself, in a sandbox"
            )
        _set_shots(loaded, name, task, choice.fewshot)
    return loaded


def run_tasks(loaded: LoadedTasks, choice: TaskChoice, scores: ModelScores) -> tuple[TaskResult, ...]:
    """Ask a model all questions; return what each task and group finds."""
    from lm_eval.evaluator import evaluate

    from llorch_serve.evaluation.lm import TaskModel

    model = TaskModel(scores)
    try:
        # What tasks print goes to stderr: stdout is for the document.
        with contextlib.redirect_stdout(sys.stderr), _drawing(loaded.drawn):
            found = evaluate(
                model,
                loaded.made,
                limit=choice.limit,
                bootstrap_iters=REDRAWS,
                log_samples=True,
                apply_chat_template=choice.chat_template,
                fewshot_as_multiturn=choice.chat_template,
            )
    except (LlorchError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # whatever a task and its functions raise, told in one line
        raise UsageError(
            f"lm-eval failed on {', '.join(loaded.made['tasks'])} with {type(error).__name__}: {error}; "
            f"correct the task, or leave it out"
        ) from error
    if model.unknown:
        loaded.notices.append(f"generation_kwargs without effect here: {', '.join(sorted(model.unknown))}")
    for count, what in ((scores.cut.scored, "scored texts"), (scores.cut.generated, "prompts")):
        if count:
            loaded.notices.append(
                f"{count} {what} were longer than the context of {scores.info.context_length} tokens and "
                f"lost their beginning"
            )
    return tuple(task_result(name, found) for name in found["results"])


def lm_eval_version() -> str:
    """Return the version of lm-eval that is installed."""
    return importlib.metadata.version("lm_eval")


def _prepare() -> None:
    """Import lm-eval without bars where nobody sees them, and without processes forked beside a model."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported
    import datasets
    import lm_eval  # noqa: F401 - fails here, with the line to install it

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def _manager(choice: TaskChoice) -> TaskManager:
    """Return what knows tasks by name: those of the folders, and lm-eval's own thousands if one is not
    there.
    """
    from lm_eval.tasks import TaskManager

    folders = [str(folder) for folder in choice.folders]
    if folders:
        manager = TaskManager(include_path=folders, include_defaults=False)
        if all(name in manager.task_index for name in choice.names):
            return manager
    manager = TaskManager(include_path=folders or None)
    if unknown := [name for name in choice.names if name not in manager.task_index]:
        raise UsageError(
            f"--tasks has {unknown[0]!r}, which lm-eval {lm_eval_version()} does not have"
            f"{' and no file in --task-folder defines' if folders else ''}; its own are listed by: "
            f"lm-eval ls tasks"
        )
    return manager


def _load(manager: TaskManager, name: str, data: Any) -> list[Any]:
    """Return the tasks or the group of a name."""
    try:
        loaded = manager.load([name])
    except LlorchError:
        raise
    except OSError as error:  # the hub's and its client's errors are
        raise data.missing(name, error) from error
    except Exception as error:  # as above
        raise UsageError(
            f"the task {name} cannot be made: {type(error).__name__}: {' '.join(str(error).split())[:500]}; "
            f"correct it, or install what it needs"
        ) from error
    inner = {child for group in loaded.get("groups", {}).values() for child in _names_in(group)}
    outer = [group for key, group in loaded.get("groups", {}).items() if key not in inner]
    return [*outer, *(task for key, task in loaded["tasks"].items() if key not in inner)]


def _names_in(group: Any) -> Iterator[str]:
    yield from (one.name for one in group.get_all_groups() if one.name != group.name)
    yield from (task.task_name for task in group.get_all_tasks())


def _set_shots(loaded: LoadedTasks, name: str, task: Any, fewshot: int | None) -> None:
    """Set how many examples a task shows, as lm-eval's own command does."""
    own = task.get_config("num_fewshot")
    if fewshot is not None and own == 0 and fewshot:
        loaded.notices.append(f"--fewshot has no effect on {name}, which is defined to have no examples")
    elif fewshot is not None:
        task.set_config(key="num_fewshot", value=fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=SEED)


@contextlib.contextmanager
def _drawing(begin: tuple[Any, Any] | None = None) -> Iterator[Callable[[], tuple[Any, Any]]]:
    """Have what tasks draw be the same each time, and lm-eval's own; then go on as if nothing had been drawn.

    begin: states to go on from; None: seeded. Yields a function that returns the states of that moment.
    """

    def states() -> tuple[Any, Any]:
        return random.getstate(), np.random.get_state()

    before = states()
    if begin is None:
        random.seed(0)
        np.random.seed(SEED)
    else:
        random.setstate(begin[0])
        np.random.set_state(begin[1])
    try:
        yield states
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
