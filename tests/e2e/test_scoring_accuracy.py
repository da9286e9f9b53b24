"""The accuracy that an evaluation finds through ``Score`` is the one that transformers has on the fp32
weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.evaluation.remote import RemoteModel
from llorch_serve.evaluation.scores import ModelScores
from llorch_serve.terminal.console import step_progress
from support.harness.processes import WorkerProcess
from tolerances import LOGPROBS

pytestmark = [pytest.mark.real_model, pytest.mark.reference, pytest.mark.slow]


def questions() -> list[dict[str, object]]:
    lines = (REPOSITORY / "examples" / "lm_eval" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[str, str]]:
    """As the task file words them."""
    return [
        (f"Question: {q['question']}\nAnswer:", f" {choice}") for q in questions() for choice in q["choices"]
    ]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def expected(
    smollm2_gguf: Path, smollm2_reference: Any, pairs: list[tuple[str, str]]
) -> list[tuple[float, bool]]:
    """transformers on the same file, in fp32: log-likelihood and greedy flag of each pair, from the
    definition.
    """
    import torch
    import transformers

    names = {"gguf_file": smollm2_gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_gguf.parent, **names)
    found = []
    for start in range(0, len(pairs), 4):
        batch = pairs[start : start + 4]
        before = len(tokenizer(batch[0][0]).input_ids)
        rows = [tokenizer(context + text).input_ids for context, text in batch]
        width = max(map(len, rows))
        padded = torch.tensor(
            [row + [0] * (width - len(row)) for row in rows]
        )  # what comes after changes nothing
        with torch.inference_mode():
            table = torch.log_softmax(smollm2_reference(padded, use_cache=False).logits.double(), -1)
        for row, logs in zip(rows, table, strict=True):
            places = range(before, len(row))
            total = sum(float(logs[i - 1, row[i]]) for i in places)
            found.append((total, all(int(logs[i - 1].argmax()) == row[i] for i in places)))
    return found


def accuracy(pairs: list[tuple[str, str]], scores: list[float], *, by_length: bool) -> float:
    """The share of questions whose right choice has the highest score, over its number of characters or
    not.
    """
    right = 0
    for index, question in enumerate(questions()):
        part = range(4 * index, 4 * index + 4)
        values = [scores[i] / (len(pairs[i][1]) - 1 if by_length else 1) for i in part]
        right += values.index(max(values)) == question["answer"]
    return right / len(questions())


def test_score_finds_the_accuracy_of_transformers(
    smollm2_worker: Callable[..., WorkerProcess],
    pairs: list[tuple[str, str]],
    expected: list[tuple[float, bool]],
) -> None:
    with WorkerClient(smollm2_worker("fp32").address) as client:
        found = ModelScores(RemoteModel(client), step_progress).log_likelihoods(pairs)
    for (logprob, is_greedy), (wanted, greedy) in zip(found, expected, strict=True):
        assert logprob == pytest.approx(wanted, abs=10 * LOGPROBS)
        assert is_greedy == greedy
    for by_length in (False, True):
        ours = accuracy(pairs, [logprob for logprob, _ in found], by_length=by_length)
        theirs = accuracy(pairs, [logprob for logprob, _ in expected], by_length=by_length)
        assert ours == theirs
        assert 0.5 < ours < 1, "the questions tell nothing about this model"
