"""One run of ``llorch eval``: all that can be refused first, then the model's work, then the verdict."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from llorch_serve.bench.resources import look_at_host
from llorch_serve.errors import UsageError
from llorch_serve.evaluation import tables
from llorch_serve.evaluation.comparison import compare, worse
from llorch_serve.evaluation.gates import Gate, check_asked, missed, read_gates
from llorch_serve.evaluation.perplexity import NamedText, measure_texts
from llorch_serve.evaluation.schema import Evaluation, Settings, TaskResult, read_evaluation
from llorch_serve.evaluation.scores import ModelScores
from llorch_serve.evaluation.tasks import LoadedTasks, TaskChoice, lm_eval_version, load_tasks, run_tasks
from llorch_serve.fidelity.reference_file import ReferenceFile, read_reference
from llorch_serve.terminal.console import fail, note, step_progress, write, write_json
from llorch_serve.terminal.evaluation_flags import GateFlags, TaskFlags, TextFlags
from llorch_serve.terminal.evaluation_model import OpenedModel
from llorch_serve.terminal.requirements import required


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of a model, read and checked. before: the baseline. loaded: the tasks of ``choice``."""

    texts: TextFlags
    read: list[NamedText]
    choice: TaskChoice | None
    loaded: LoadedTasks | None
    reference: ReferenceFile | None
    gates: tuple[Gate, ...]
    before: Evaluation | None
    fail_if_worse: bool

    def evaluate(self, opened: OpenedModel) -> Evaluation:
        """Ask the model everything."""
        model = opened.described()
        if self.choice is not None and self.choice.chat_template and not opened.asked.info.has_chat_template:
            raise UsageError(f"{model.model_id} has no chat template; leave --chat-template out")
        window, stride = self.texts.lengths(model.context_length)
        scores = ModelScores(opened.asked, step_progress)
        found = measure_texts(scores, self.read, window=window, stride=stride)
        settings, version = Settings(), None
        results: tuple[TaskResult, ...] = ()
        notices: tuple[str, ...] = ()
        if self.choice is not None and self.loaded is not None:
            results = run_tasks(self.loaded, self.choice, scores)
            version, notices = lm_eval_version(), tuple(self.loaded.notices)
            settings = Settings(
                limit=self.choice.limit,
                fewshot=self.choice.fewshot,
                chat_template=self.choice.chat_template,
            )
        return Evaluation(
            version=importlib.metadata.version("llorch"),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            host=look_at_host(),
            model=model,
            settings=settings,
            fidelity=opened.fidelity,
            texts=found,
            lm_eval=version,
            tasks=results,
            notices=notices,
        )


def plan(texts: TextFlags, tasks: TaskFlags, gates: GateFlags, reference: Path | None) -> Asked:
    """Read everything that flags name, so that a mistake shows before a model is loaded.

    Raises UsageError, ArtifactError for a reference that is none, ProviderError if lm-eval is missing, and
    HubError if a data set is.
    """
    choice = tasks.choice()
    wanted = read_gates(gates.at_least or (), gates.at_most or ())
    read = texts.read(tasks=choice is not None)
    names = () if choice is None else choice.names
    check_asked(wanted, texts=bool(read), reference=reference is not None, tasks=names)
    if gates.fail_if_worse and gates.baseline is None:
        raise UsageError("--fail-if-worse has no effect without --baseline; add it, or leave it out")
    return Asked(
        texts=texts,
        read=read,
        choice=choice,
        reference=None if reference is None else read_reference(reference),
        gates=wanted,
        before=None if gates.baseline is None else read_evaluation(gates.baseline),
        fail_if_worse=gates.fail_if_worse,
        loaded=None if choice is None else _loaded(choice),
    )


def judge(found: Evaluation, asked: Asked, *, as_json: bool) -> None:
    """Compare with the baseline, print everything, and exit with 1 if a limit is missed."""
    comparison = None if asked.before is None else compare(asked.before, found)
    whole = msgspec.structs.replace(found, comparison=comparison)
    for one in whole.notices:
        note(one)
    if as_json:
        write_json(whole)
    else:
        write(tables.terminal(whole))
    lines = missed(asked.gates, whole)
    if asked.fail_if_worse and comparison is not None:
        lines += worse(comparison)
    for line in lines:
        fail(line, 1)
    if lines:
        raise SystemExit(1)


def _loaded(choice: TaskChoice) -> LoadedTasks:
    with required("eval"):
        import lm_eval  # noqa: F401 - fails here, with the line to install it
    return load_tasks(choice)
