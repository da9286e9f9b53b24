"""Log-probabilities of prompts, continuations and answers, held against transformers' log_softmax on the same
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.evaluation.windows import windows
from llorch_serve.loading.worker import load_worker
from llorch_serve.requests import GenerationRequest, GenerationUpdate, ScoreRequest, TokenPrompt
from llorch_serve.worker.local import score, stream
from llorch_serve.worker.worker import Worker
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, random_ids
from support.harness.worker import split_options
from tolerances import LOGPROBS

pytestmark = pytest.mark.reference

PROMPT = tuple(random_ids(70, seed=3))


@dataclass(frozen=True)
class Case:
    """A worker and transformers' model on the same weights."""

    worker: Worker
    model: object

    def log_probabilities(self, ids: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """[tokens, vocabulary]: transformers' log-softmax after each token."""
        import torch

        with torch.inference_mode():
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0]  # type: ignore[operator]
            found: npt.NDArray[np.float64] = torch.log_softmax(logits.double(), -1).numpy()
        return found

    def of(self, ids: tuple[int, ...], first: int) -> list[float]:
        """What transformers gives the tokens from ``first`` on."""
        table = self.log_probabilities(ids)
        return [float(table[i - 1, ids[i]]) for i in range(first, len(ids))]

    def answers(self, **sampling: object) -> dict[int, list[GenerationUpdate]]:
        """All updates of a request, answer by answer."""
        answers, params = split_options(sampling)
        found: dict[int, list[GenerationUpdate]] = {}
        request = GenerationRequest("r", TokenPrompt(PROMPT), params, answers=answers)
        for update in stream(self.worker, request):
            found.setdefault(update.index, []).append(update)
        return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("scoring")
    source = write_hf_folder(folder / "source")
    artifact = export_tiny(source, folder / "artifact")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    config = EngineConfig(session=SessionConfig(threads=1, slots=3), prefill_chunk=32)
    worker = load_worker(artifact.folder, config, lambda _report: None)
    yield Case(worker, model)
    worker.close()


def test_prompt_logprobs(case: Case) -> None:
    updates = case.answers(prompt_logprobs=5, max_tokens=2, temperature=0.0, ignore_eos=True)[0]
    told = updates[0].prompt_logprobs
    assert [place.chosen.logprob for place in told] == pytest.approx(case.of(PROMPT, 1), abs=LOGPROBS)
    table = case.log_probabilities(PROMPT)
    for row, place in zip(table, told, strict=False):
        best = np.sort(row)[::-1][:5]
        assert [other.logprob for other in place.top] == pytest.approx(best.tolist(), abs=LOGPROBS)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_scores_of_continuations(case: Case, logprobs: int | None) -> None:
    likely = tuple(
        t for u in case.answers(max_tokens=6, temperature=0.0, ignore_eos=True)[0] for t in u.token_ids
    )
    continuations = (likely, tuple(random_ids(9, seed=4)), (5,), (*likely[:5], (likely[5] + 1) % 512))
    asked = tuple(map(TokenPrompt, continuations))
    found = score(case.worker, ScoreRequest("s", TokenPrompt(PROMPT), asked, logprobs))
    for result, tokens in zip(found, continuations, strict=True):
        expected = case.of(PROMPT + tokens, len(PROMPT))
        assert result.logprob == pytest.approx(sum(expected), abs=len(tokens) * LOGPROBS)
        greedy = case.log_probabilities(PROMPT + tokens)[len(PROMPT) - 1 : -1].argmax(-1).tolist()
        assert result.is_greedy == (greedy == list(tokens))
        assert [place.chosen.logprob for place in result.logprobs] == (
            pytest.approx(expected, abs=LOGPROBS) if logprobs is not None else []
        )
    assert [result.is_greedy for result in found] == [True, False, False, False]


def test_best_of_is_the_best_by_transformers_too(case: Case) -> None:
    sampling = {"seed": 5, "temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    several = {
        i: tuple(t for u in part for t in u.token_ids) for i, part in case.answers(n=6, **sampling).items()
    }
    means = {i: float(np.mean(case.of(PROMPT + ids, len(PROMPT)))) for i, ids in several.items()}
    ranked = sorted(means, key=lambda i: -means[i])
    chosen = case.answers(n=2, best_of=6, **sampling)
    assert [part[0].token_ids for part in chosen.values()] == [several[i] for i in ranked[:2]]


def test_greedy_answers_of_one_prompt_are_the_same(case: Case) -> None:
    answers = case.answers(n=5, temperature=0.0, max_tokens=20, ignore_eos=True)
    ids = {tuple(token for update in part for token in update.token_ids) for part in answers.values()}
    alone = case.answers(temperature=0.0, max_tokens=20, ignore_eos=True)[0]
    assert ids == {tuple(token for update in alone for token in update.token_ids)}


def test_a_text_in_windows_is_scored_whole(case: Case) -> None:
    ids = tuple(random_ids(300, seed=6))
    found = 0.0
    for part in windows(ids, 128, 128):
        context = TokenPrompt(part.context or (1,))
        [result] = score(case.worker, ScoreRequest("w", context, (TokenPrompt(part.tokens),)))
        found += result.logprob
    expected = (
        sum(case.of((1, *ids[:128]), 1)) + sum(case.of(ids[127:256], 1)) + sum(case.of(ids[171:300], 85))
    )
    assert found == pytest.approx(expected, abs=300 * LOGPROBS)
