"""An evaluation as a document: what ``llorch eval --json`` writes, tables show, and gates judge.

``artifacts/eval.schema.json`` is generated from these types by ``ci/generate-schema``; docs/evaluation.md
says what each figure means.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec

from llorch_serve.artifact.manifest import Count, Sha256
from llorch_serve.bench.schema import Better, Host, NonNegative, Share01
from llorch_serve.files.documents import read_document

SCHEMA_VERSION: Final = 1
_MAX_BYTES: Final = 256 * 2**20

Verdict = Literal["worse", "better", "noise", "same", "unknown", "incomparable"]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the document's parts: immutable, and strict about unknown fields."""


class EvaluatedModel(_Struct, frozen=True, kw_only=True):
    """What was evaluated. The fields are those of ``GetModelInfo``; version: llorch's, of the worker.

    address: of the worker; absent: the model ran in this process.
    """

    model_id: str
    fingerprint: str
    precision: str
    head_precision: str
    provider: str
    device: str
    context_length: Count
    slots: Count
    batch_invariant: bool
    kind: str
    version: str
    address: str | msgspec.UnsetType = msgspec.UNSET


class MeasuredFidelity(_Struct, frozen=True, kw_only=True):
    """Divergence from a kept reference, as ``llorch verify --reference`` measures it.

    kl: mean, in nats. top1: share of positions with the same likeliest token. limit: for ``kl``, the recipe's
        widened by what the reference's float16 costs.
    same_source: whether the artifact was made from the checkpoint that the reference ran.
    """

    kl: float
    top1: Share01
    tokens: Count
    text: str
    oracle: str
    limit: float
    passed: bool
    same_source: bool


class Fidelity(_Struct, frozen=True, kw_only=True):
    """How far the artifact is from its checkpoint. kl_limit: what its recipe allows, from the manifest.

    measured: absent without ``--reference``.
    """

    kl_limit: float
    measured: MeasuredFidelity | msgspec.UnsetType = msgspec.UNSET


class TextResult(_Struct, frozen=True, kw_only=True):
    """How well the model predicts a text. A perplexity beyond every float is null.

    name: the file's, ``sample`` for the text that comes with llorch, ``all`` for several together.
    words: as lm-eval counts them. window, stride: tokens that the model reads at once, and that each window
        but the first predicts.
    log_likelihood: sum over all tokens, in nats.
    stderr: standard error of ``bits_per_byte``, by how much it varies from block to block; null: one block.
    blocks: sums of log-probabilities of ``block_tokens`` tokens each, the last one of fewer.
    """

    name: str
    sha256: Sha256
    bytes: Count
    words: Count
    tokens: Count
    window: Count
    stride: Count
    log_likelihood: float
    perplexity: float | None
    word_perplexity: float | None
    byte_perplexity: float | None
    bits_per_byte: float
    stderr: float | None
    block_tokens: Count
    blocks: tuple[float, ...]


class Metric(_Struct, frozen=True, kw_only=True):
    """One figure of a task. filter: lm-eval's name of what answers went through; ``none``.

    value: null where lm-eval gives no number. stderr: lm-eval's; null where it has none.
    samples: each question's value, in order, where ``value`` is their mean.
    """

    name: str
    filter: str
    value: float | None
    stderr: float | None
    better: Better | None
    samples: tuple[float, ...] | None


class TaskResult(_Struct, frozen=True, kw_only=True):
    """What lm-eval found for a task, or for a group of them.

    version: the task's own, null where it has none. shots: examples before each question.
    n: questions asked; of: all that the task has; null for a group.
    samples_sha256: over the questions and their prompts, so that figures of two models are compared question
        by question where they answered the same ones; null for a group.
    """

    task: str
    version: str | None
    shots: NonNegative | None
    n: NonNegative
    of: NonNegative | None
    samples_sha256: Sha256 | None
    metrics: tuple[Metric, ...]


class Settings(_Struct, frozen=True, kw_only=True):
    """What was asked for beside texts and tasks. limit: questions of each task, or a share below 1."""

    limit: float | None = None
    fewshot: int | None = None
    chat_template: bool = False


class Difference(_Struct, frozen=True, kw_only=True):
    """A figure against the same one of the baseline.

    stderr: standard error of the difference; null: not known. paired: it is from the differences of single
        questions or blocks. changed: how many of those differ.
    verdict: ``worse`` or ``better`` beyond noise, ``noise`` within it, ``same``, ``unknown`` where there is
        no standard error, ``incomparable`` with the reason in ``why``.
    """

    name: str
    before: float | None
    after: float | None
    difference: float | None
    stderr: float | None
    paired: bool
    changed: NonNegative | None
    verdict: Verdict
    why: str | msgspec.UnsetType = msgspec.UNSET


class Comparison(_Struct, frozen=True, kw_only=True):
    """Against which model, and what differs."""

    model_id: str
    fingerprint: str
    differences: tuple[Difference, ...]


class Evaluation(_Struct, frozen=True, kw_only=True):
    """The document. version: llorch's here. created: UTC, ISO 8601. lm_eval: its version, where tasks were
    run. notices: what a reader of the figures should know.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    version: str
    created: str
    host: Host
    model: EvaluatedModel
    settings: Settings
    fidelity: Fidelity | None = None
    texts: tuple[TextResult, ...] = ()
    lm_eval: str | None = None
    tasks: tuple[TaskResult, ...] = ()
    comparison: Comparison | None = None
    notices: tuple[str, ...] = ()


def metric_name(task: TaskResult, metric: Metric) -> str:
    """Return what a metric is called: ``TASK.METRIC``, and ``,FILTER`` where a task has several filters."""
    several = len({other.filter for other in task.metrics if other.name == metric.name}) > 1
    return f"{task.task}.{metric.name},{metric.filter}" if several else f"{task.task}.{metric.name}"


def figures(evaluation: Evaluation) -> Iterator[tuple[str, float | None]]:
    """Yield all figures that have a name: of the text, or of all texts together, of fidelity, of tasks."""
    if evaluation.texts:
        text = evaluation.texts[-1]
        for name in ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"):
            yield name, getattr(text, name)
    if evaluation.fidelity is not None and evaluation.fidelity.measured is not msgspec.UNSET:
        yield "kl", evaluation.fidelity.measured.kl
        yield "top1", evaluation.fidelity.measured.top1
    for task in evaluation.tasks:
        for metric in task.metrics:
            yield metric_name(task, metric), metric.value


def read_evaluation(path: Path) -> Evaluation:
    """Read a document. Raises UsageError for anything else than one of this version."""
    what = f"evaluation of schema version {SCHEMA_VERSION}"
    return read_document(path, Evaluation, what=what, made_by="llorch eval --json", most_bytes=_MAX_BYTES)
