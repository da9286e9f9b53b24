"""Two evaluations, figure by figure: the difference, its standard error, and whether it is more than noise.

Where both models read the same tokens, or answered the same questions, the standard error is of the single
differences: two models of one checkpoint err on the same questions, so it is far smaller than either's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from llorch_serve.bench.schema import Better
from llorch_serve.errors import UsageError
from llorch_serve.evaluation.perplexity import sum_error
from llorch_serve.evaluation.schema import (
    Comparison,
    Difference,
    Evaluation,
    Metric,
    TaskResult,
    TextResult,
    Verdict,
    metric_name,
)

SURE: Final = 1.96
"""Standard errors beyond which a difference is more than noise: one of 20 is so by chance alone."""

CHANCE: Final = 0.05


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """Return what differs. Raises UsageError where the two have no figure in common."""
    found = [*_texts(before, after), *_fidelity(before, after), *_tasks(before, after)]
    if not any(one.verdict != "incomparable" for one in found):
        reasons = "; ".join(dict.fromkeys(str(one.why) for one in found)) or "it has none of these figures"
        raise UsageError(
            f"the baseline, an evaluation of {before.model.model_id}, cannot be compared: {reasons}; "
            "evaluate it with the same texts, tasks and flags"
        )
    return Comparison(
        model_id=before.model.model_id, fingerprint=before.model.fingerprint, differences=tuple(found)
    )


def worse(comparison: Comparison) -> list[str]:
    """Return a line for each figure that is worse beyond noise, or no number any more."""
    return [
        f"{one.name} is no number and was {one.before:.6g}"
        if one.after is None
        else f"{one.name} is {one.after:.6g} and was {one.before:.6g}: worse than noise "
        f"({one.difference:+.4g} ± {one.stderr:.2g})"
        for one in comparison.differences
        if one.verdict == "worse"
    ]


def _texts(before: Evaluation, after: Evaluation) -> Iterator[Difference]:
    if not after.texts:
        return
    new = after.texts[-1]
    old = next((text for text in before.texts if text.sha256 == new.sha256), None)
    if old is None:
        yield _incomparable("perplexity", None, new.perplexity, "the baseline read other texts, or none")
    elif (old.window, old.stride) != (new.window, new.stride):
        why = f"the baseline had --window {old.window} --stride {old.stride}"
        yield _incomparable("perplexity", old.perplexity, new.perplexity, why)
    else:
        yield _text(old, new)


def _text(old: TextResult, new: TextResult) -> Difference:
    """Compare by bits per byte where tokens differ, which alone has a meaning then; else by perplexity."""
    paired = (old.tokens, len(old.blocks)) == (new.tokens, len(new.blocks))
    if not paired:
        error = None
        if old.stderr is not None and new.stderr is not None:
            error = math.hypot(old.stderr, new.stderr)
        return _difference(
            "bits_per_byte", old.bits_per_byte, new.bits_per_byte, error, better="lower", changed=None
        )
    parts = [b - a for a, b in zip(old.blocks, new.blocks, strict=True)]
    changed = sum(part != 0 for part in parts)
    error = sum_error(parts)
    if error is not None and new.perplexity is not None:
        error *= new.perplexity / new.tokens  # of the logarithm's, to first order
    found = _difference(
        "perplexity", old.perplexity, new.perplexity, error, better="lower", changed=changed, paired=True
    )
    return _doubted(found, parts)


def _fidelity(before: Evaluation, after: Evaluation) -> Iterator[Difference]:
    """Compare divergences, of which no standard error is known."""
    measured = [
        None if one.fidelity is None or one.fidelity.measured is msgspec.UNSET else one.fidelity.measured
        for one in (before, after)
    ]
    old, new = measured
    if new is None:
        return
    if old is None or (old.text, old.tokens, old.oracle) != (new.text, new.tokens, new.oracle):
        why = "the baseline was compared with another reference, or with none"
        yield _incomparable("kl", None, new.kl, why)
        return
    yield _difference("kl", old.kl, new.kl, None, better="lower", changed=None)
    yield _difference("top1", old.top1, new.top1, None, better="higher", changed=None)


def _tasks(before: Evaluation, after: Evaluation) -> Iterator[Difference]:
    earlier = {task.task: task for task in before.tasks}
    for task in after.tasks:
        old = earlier.get(task.task)
        why = _unlike(old, task, before, after)
        known = {} if old is None else {(one.name, one.filter): one for one in old.metrics}
        for metric in task.metrics:
            name, was = metric_name(task, metric), known.get((metric.name, metric.filter))
            if why is not None or was is None:
                value = None if was is None else was.value
                yield _incomparable(name, value, metric.value, why or "the baseline has no such metric")
            else:
                same = old is not None and old.samples_sha256 == task.samples_sha256 is not None
                yield _metric(name, was, metric, same_questions=same)


def _unlike(old: TaskResult | None, new: TaskResult, before: Evaluation, after: Evaluation) -> str | None:
    """Return why two results of a task are not of the same thing; None if they are."""
    if old is None:
        return "the baseline has no such task"
    for what, was, now in (
        ("version", old.version, new.version),
        ("shots", old.shots, new.shots),
        ("questions", old.n, new.n),
        ("--chat-template", before.settings.chat_template, after.settings.chat_template),
    ):
        if was != now:
            return f"{what}: {was} in the baseline, {now} now"
    return None


def _metric(name: str, old: Metric, new: Metric, *, same_questions: bool) -> Difference:
    was, now = old.samples or (), new.samples or ()
    if same_questions and was and len(was) == len(now):
        parts = [b - a for a, b in zip(was, now, strict=True)]
        error = float(np.std(parts, ddof=1)) / math.sqrt(len(parts)) if len(parts) > 1 else None
        changed = sum(part != 0 for part in parts)
        found = _difference(
            name, old.value, new.value, error, better=new.better, changed=changed, paired=True
        )
        return _doubted(found, parts)
    error = None
    if old.stderr is not None and new.stderr is not None:
        error = math.hypot(old.stderr, new.stderr)
    return _difference(name, old.value, new.value, error, better=new.better, changed=None)


def _doubted(found: Difference, parts: Sequence[float]) -> Difference:
    """Return a paired difference; as noise where so few parts differ that their signs may be chance."""
    if found.verdict in ("worse", "better") and found.difference is not None and by_chance(parts) > CHANCE:
        return msgspec.structs.replace(found, verdict="noise")
    return found


def by_chance(differences: Sequence[float]) -> float:
    """Return how likely it is that so many of the differences that are not 0 have the same sign, were either
    sign as likely: the exact two-sided sign test. A few questions say little, however far a mean moves.
    """
    up, down = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    count = up + down
    ways, tail = 1, 0
    for k in range(min(up, down) + 1):
        tail += ways  # count over k
        ways = ways * (count - k) // (k + 1)
    return float(min(1.0, 2 * tail / 2**count))


def _difference(
    name: str,
    before: float | None,
    after: float | None,
    stderr: float | None,
    *,
    better: Better | None,
    changed: int | None,
    paired: bool = False,
) -> Difference:
    if before is None or not math.isfinite(before):
        return _incomparable(name, None, after, "it was no number in the baseline")
    if after is None or not math.isfinite(after):  # as where a model is broken, which nothing is worse than
        return Difference(
            name=name,
            before=before,
            after=None,
            difference=None,
            stderr=None,
            paired=paired,
            changed=changed,
            verdict="worse",
        )
    difference = after - before
    return Difference(
        name=name,
        before=before,
        after=after,
        difference=difference,
        stderr=stderr,
        paired=paired,
        changed=changed,
        verdict=_verdict(difference, stderr, better, changed),
    )


def _verdict(difference: float, stderr: float | None, better: Better | None, changed: int | None) -> Verdict:
    if difference == 0 and not changed:
        return "same"
    if stderr is None or better is None:
        return "unknown"
    if abs(difference) <= SURE * stderr:
        return "noise"
    return "better" if (difference > 0) == (better == "higher") else "worse"


def _incomparable(name: str, before: float | None, after: float | None, why: str) -> Difference:
    return Difference(
        name=name,
        before=before,
        after=after,
        difference=None,
        stderr=None,
        paired=False,
        changed=None,
        verdict="incomparable",
        why=why,
    )
