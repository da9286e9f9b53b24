"""Perplexity, gates and comparisons from their definitions, with numpy."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from llorch_serve.bench.schema import Better, Host
from llorch_serve.errors import UsageError
from llorch_serve.evaluation.comparison import by_chance, compare, worse
from llorch_serve.evaluation.gates import check_asked, missed, read_gates
from llorch_serve.evaluation.perplexity import NamedText, block_size, text_result, together
from llorch_serve.evaluation.schema import (
    EvaluatedModel,
    Evaluation,
    Fidelity,
    MeasuredFidelity,
    Metric,
    Settings,
    TaskResult,
    TextResult,
    figures,
    read_evaluation,
)
from llorch_serve.evaluation.tables import terminal

HOST = Host(system="s", cpu="c", cpu_features=(), cpus=1, cpus_allowed=1, memory_bytes=1)
TEXT = " Straße, one two\nthree "


def model(name: str = "m") -> EvaluatedModel:
    return EvaluatedModel(
        model_id=name,
        fingerprint="f" * 64,
        precision="int8",
        head_precision="int8",
        provider="CPUExecutionProvider",
        device="cpu",
        context_length=64,
        slots=2,
        batch_invariant=True,
        kind="llorch",
        version="1",
    )


def evaluation(**fields: object) -> Evaluation:
    made = {"version": "1", "created": "now", "host": HOST, "model": model(), "settings": Settings()}
    return Evaluation(**{**made, **fields})  # type: ignore[arg-type]


def logprobs(count: int, seed: int = 0) -> list[float]:
    return [-float(value) for value in np.random.default_rng(seed).exponential(3, count)]


def text(values: list[float], name: str = "t", content: str = TEXT, window: int = 64) -> TextResult:
    return text_result(NamedText(name, content), values, window=window, stride=window)


def task(
    values: list[float], *, version: str = "1", better: str | None = "higher", sha: str = "a"
) -> TaskResult:
    found = np.array(values)
    metric = Metric(
        name="acc",
        filter="none",
        value=float(found.mean()),
        stderr=float(found.std(ddof=1) / math.sqrt(len(found))),
        better=better,  # type: ignore[arg-type]
        samples=tuple(values),
    )
    return TaskResult(
        task="t", version=version, shots=0, n=len(values), of=100, samples_sha256=sha * 64, metrics=(metric,)
    )


def test_perplexity_is_that_of_the_definition() -> None:
    values = logprobs(300)
    found = text(values)
    total = np.sum(np.array(values, np.float64))
    assert found.tokens == 300
    assert found.bytes == len(TEXT.encode()) == 24
    assert found.words == 6  # as lm-eval counts: white space at both ends makes an empty word each
    assert found.log_likelihood == pytest.approx(total)
    assert found.perplexity == pytest.approx(np.exp(-total / 300))
    assert found.word_perplexity == pytest.approx(np.exp(-total / 6))
    assert found.byte_perplexity == pytest.approx(np.exp(-total / 24))
    assert found.bits_per_byte == pytest.approx(-total / np.log(2) / 24)
    sums = np.array([np.sum(values[i : i + 64]) for i in range(0, 300, 64)])
    assert found.blocks == pytest.approx(tuple(sums))
    assert found.stderr == pytest.approx(sums.std(ddof=1) * np.sqrt(5) / (24 * np.log(2)))


def test_a_perplexity_beyond_every_float_is_no_number() -> None:
    found = text([-1000.0] * 6)
    assert found.word_perplexity is None
    assert found.stderr is None
    assert found.bits_per_byte > 0
    msgspec.json.decode(msgspec.json.encode(found), type=TextResult)
    whole = evaluation(texts=(found,))
    assert missed(read_gates([], ["word_perplexity=1e9"]), whole) == [
        "word_perplexity is no number, missed --at-most word_perplexity=1e+09"
    ]
    assert "-" in terminal(whole)


def test_several_texts_are_one_by_all_their_tokens() -> None:
    first, second = logprobs(100, 1), logprobs(50, 2)
    found = together([text(first, "a", "a b"), text(second, "b", "c")])
    assert found.name == "all"
    assert found.perplexity == pytest.approx(math.exp(-math.fsum(first + second) / 150))
    assert (found.tokens, found.words, found.bytes) == (150, 3, 4)


@pytest.mark.parametrize("tokens", [1, 64, 65, 128_000, 128_001, 10_000_000])
def test_there_are_never_too_many_blocks(tokens: int) -> None:
    assert 1 <= math.ceil(tokens / block_size(tokens)) <= 2000


def test_figures_go_by_names_and_filters_tell_metrics_of_one_name_apart() -> None:
    metrics = tuple(
        Metric(name="exact_match", filter=kind, value=0.5, stderr=None, better=None, samples=None)
        for kind in ("strict", "flexible")
    )
    several = msgspec.structs.replace(task([1, 0]), metrics=metrics)
    measured = MeasuredFidelity(
        kl=0.1, top1=0.9, tokens=8, text="sample", oracle="o", limit=0.2, passed=True, same_source=True
    )
    fidelity = Fidelity(kl_limit=0.2, measured=measured)
    whole = evaluation(texts=(text([-1.0]),), tasks=(several,), fidelity=fidelity)
    assert [name for name, _ in figures(whole)] == [
        *("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "kl", "top1"),
        *("t.exact_match,strict", "t.exact_match,flexible"),
    ]


def test_gates_are_kept_or_missed_with_one_line_each() -> None:
    whole = evaluation(texts=(text([-2.0, -2.0]),), tasks=(task([1, 1, 0, 1]),))
    kept = read_gates(["t.acc=0.75"], [f"perplexity={math.exp(2) + 1e-9}"])
    assert missed(kept, whole) == []
    assert missed(read_gates(["t.acc=0.76", "perplexity=9"], ["perplexity=7"]), whole) == [
        "t.acc is 0.75, missed --at-least t.acc=0.76",
        "perplexity is 7.38906, missed --at-least perplexity=9",
        "perplexity is 7.38906, missed --at-most perplexity=7",
    ]
    with pytest.raises(UsageError, match=r"--at-least t\.accc=1: there is no such figure; found .*t\.acc"):
        missed(read_gates(["t.accc=1"], []), whole)


@pytest.mark.parametrize("given", ["acc", "=1", "acc=", "acc=nan", "acc=inf", "acc=x", ""])
def test_a_gate_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match=r"--at-most is .*; expected FIGURE=NUMBER"):
        read_gates([], [given])


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        ("perplexity=1", "no text is read; add --text FILE"),
        ("kl=1", "add --reference FILE"),
        ("arc_easy.acc=1", "no task is run"),
        ("acc=1", "expected TASK.METRIC"),
    ],
)
def test_a_gate_of_what_is_not_measured_is_refused_before_anything_is(gate: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_asked(read_gates([gate], []), texts=False, reference=False, tasks=())
    check_asked(read_gates(["perplexity=1", "kl=1", "t.a=1"], []), texts=True, reference=True, tasks=("t",))


def test_a_text_is_compared_block_by_block() -> None:
    before = logprobs(64 * 20)
    after = [value - 0.05 - 0.01 * (place % 3) for place, value in enumerate(before)]
    [one] = compare(evaluation(texts=(text(before),)), evaluation(texts=(text(after),))).differences
    assert (one.name, one.verdict, one.paired, one.changed) == ("perplexity", "worse", True, 20)
    sums = np.add.reduceat(np.array(after) - np.array(before), range(0, 1280, 64))
    log_error = sums.std(ddof=1) * np.sqrt(20) / 1280
    new = math.exp(-math.fsum(after) / 1280)
    assert one.stderr == pytest.approx(new * log_error)
    assert one.difference == pytest.approx(new - math.exp(-math.fsum(before) / 1280))
    # Either text's own error is far larger: unpaired, the same difference would be noise.
    assert text(after).stderr is not None
    assert one.difference < 1.96 * new * text(after).stderr * 24 * math.log(2) / 1280


def test_a_text_of_other_tokens_is_compared_by_bits_per_byte() -> None:
    first, second = text(logprobs(640, 1)), text(logprobs(700, 2))
    [one] = compare(evaluation(texts=(first,)), evaluation(texts=(second,))).differences
    assert (one.name, one.paired) == ("bits_per_byte", False)
    assert first.stderr is not None
    assert second.stderr is not None
    assert one.stderr == pytest.approx(math.hypot(first.stderr, second.stderr))


def test_questions_are_compared_one_by_one() -> None:
    generator = np.random.default_rng(5)
    before = [float(value) for value in generator.random(400) < 0.6]
    after = [0.0 if place % 20 == 0 else value for place, value in enumerate(before)]
    [one] = compare(evaluation(tasks=(task(before),)), evaluation(tasks=(task(after),))).differences
    parts = np.array(after) - np.array(before)
    assert one.stderr == pytest.approx(parts.std(ddof=1) / 20)
    assert (one.name, one.verdict, one.changed) == ("t.acc", "worse", int((parts != 0).sum()))
    [back] = compare(evaluation(tasks=(task(after),)), evaluation(tasks=(task(before),))).differences
    assert back.verdict == "better"
    # Other questions: each model's own error, which is far larger.
    other = evaluation(tasks=(task(after, sha="b"),))
    [unpaired] = compare(evaluation(tasks=(task(before),)), other).differences
    assert (unpaired.verdict, unpaired.paired) == ("noise", False)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([1, 1, 1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0, 0, 0], "same"),
        ([1] * 10, [1] * 9 + [0], "noise"),
        # Two standard errors, yet four questions of the same sign come by chance in one of eight cases.
        ([1] * 10, [1] * 6 + [0] * 4, "noise"),
        ([1] * 10, [1] * 3 + [0] * 7, "worse"),
        ([0, 1], [1, 0], "noise"),
        ([0, 0], [1, 1], "noise"),
    ],
)
def test_few_questions_say_little(before: list[float], after: list[float], verdict: str) -> None:
    [one] = compare(evaluation(tasks=(task(before),)), evaluation(tasks=(task(after),))).differences
    assert one.verdict == verdict


@pytest.mark.parametrize(("up", "down"), [(0, 0), (1, 0), (4, 0), (7, 3), (3, 7), (60, 40), (3000, 2000)])
def test_chance_is_the_binomials(up: int, down: int) -> None:
    from statistics import NormalDist

    found = by_chance([1.0] * up + [-0.5] * down + [0.0] * 9)
    count, few = up + down, min(up, down)
    exact = 2 * sum(math.exp(math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
                             - count * math.log(2)) for k in range(few + 1))  # fmt: skip
    assert found == pytest.approx(min(1.0, exact), rel=1e-6)
    if count > 1000:
        assert found == pytest.approx(
            2 * NormalDist().cdf((few + 0.5 - count / 2) / (count**0.5 / 2)), rel=0.1
        )


@pytest.mark.parametrize(
    ("old", "why"),
    [
        ({"tasks": (task([1, 0], version="2"),)}, "version: 2 in the baseline, 1 now"),
        ({"tasks": (task([1, 0, 0]),)}, "questions: 3 in the baseline, 2 now"),
        ({"tasks": (task([1, 0]),), "settings": Settings(chat_template=True)}, "--chat-template"),
        ({"texts": (text([-1.0]),)}, "the baseline has no such task"),
    ],
)
def test_what_is_not_the_same_task_is_not_compared(old: dict[str, object], why: str) -> None:
    both = {"texts": (text([-1.0, -2.0]),)}
    now = evaluation(tasks=(task([1, 0]),), **both)
    [_, one] = compare(evaluation(**{**both, **old}), now).differences
    assert one.verdict == "incomparable"
    assert why in str(one.why)
    assert why in terminal(
        msgspec.structs.replace(now, comparison=compare(evaluation(**{**both, **old}), now))
    )
    with pytest.raises(UsageError, match="cannot be compared: "):
        compare(evaluation(**old), evaluation(tasks=now.tasks))


def test_other_windows_are_not_compared() -> None:
    now = evaluation(texts=(text([-1.0]),), tasks=(task([1, 0]),))
    [one, _] = compare(evaluation(texts=(text([-1.0], window=32),), tasks=now.tasks), now).differences
    assert one.why == "the baseline had --window 32 --stride 32"
    [other, _] = compare(evaluation(texts=(text([-1.0], content="x"),), tasks=now.tasks), now).differences
    assert other.why == "the baseline read other texts, or none"


def test_a_metric_without_a_direction_or_an_error_has_no_verdict() -> None:
    before, after = task([1, 0, 1, 1], better=None), task([0, 0, 1, 1], better=None)
    [one] = compare(evaluation(tasks=(before,)), evaluation(tasks=(after,))).differences
    assert one.verdict == "unknown"


def test_a_document_is_read_back_and_anything_else_is_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.json", evaluation(texts=(text(logprobs(100)),), tasks=(task([1, 0]),))
    path.write_bytes(msgspec.json.encode(whole))
    assert read_evaluation(path) == whole
    for content in (b"", b"[]", b"\xff", b'{"schema_version": 2}', b"[" * 100_000, b'{"schema_version": 1}'):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"is no evaluation of schema version 1.*llorch eval --json"):
            read_evaluation(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_evaluation(tmp_path)


@pytest.mark.parametrize(
    ("broken", "count"), [(math.nan, 640), (math.nan, 700), (-math.inf, 640), (-1e6, 640)]
)
def test_a_model_that_predicts_nothing_any_more_is_worse(broken: float, count: int) -> None:
    before, after = logprobs(640), [broken, *logprobs(count - 1, 1)]
    now = evaluation(texts=(text(after),), tasks=(task([1, 0]),))
    found = compare(evaluation(texts=(text(before),), tasks=(task([1, 0]),)), now)
    assert [one.verdict for one in found.differences] == ["worse", "same"]
    [line] = worse(found)
    assert line.startswith(f"{found.differences[0].name} is no number and was ")
    assert "worse" in terminal(msgspec.structs.replace(now, comparison=found))


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_a_metric_that_is_no_number_any_more_is_worse(better: Better) -> None:
    old = task([1, 0, 1], better=better)
    [metric] = old.metrics
    gone = msgspec.structs.replace(old, metrics=(msgspec.structs.replace(metric, value=None, samples=None),))
    rest = {"texts": (text(logprobs(640)),)}
    found = compare(evaluation(tasks=(old,), **rest), evaluation(tasks=(gone,), **rest))
    [_, one] = found.differences
    assert (one.verdict, one.difference) == ("worse", None)
    assert worse(found) == ["t.acc is no number and was 0.666667"]
    [_, back] = compare(evaluation(tasks=(gone,), **rest), evaluation(tasks=(old,), **rest)).differences
    assert back.verdict == "incomparable"
