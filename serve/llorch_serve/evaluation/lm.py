"""A model of lm-eval that asks ours. It needs lm-eval, so ``tasks.py`` imports it when tasks are run."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from llorch_serve.errors import UsageError
from llorch_serve.evaluation.scores import ModelScores
from llorch_serve.requests import ChatMessage, ChatPrompt
from llorch_serve.sampling.params import SamplingParams

MOST_TOKENS: Final = 256  # what lm-eval's own models generate where a task does not say
KNOWN: Final = frozenset(
    {
        "until", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed",
        "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens",
    }
)  # fmt: skip
"""What of a task's ``generation_kwargs`` has an effect."""


class TaskModel(LM):  # type: ignore[misc]  # lm-eval may not be there when types are checked
    """Implements lm-eval's interface. unknown: what tasks asked for that has no effect here."""

    def __init__(self, scores: ModelScores) -> None:
        super().__init__()
        self._scores = scores
        self.unknown: set[str] = set()

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval keeps what it has rendered."""
        return self._scores.info.fingerprint

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-likelihood, and whether greedy decoding says the
        same.
        """
        return self._scores.log_likelihoods([request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text."""
        return self._scores.whole_texts([request.args[0] for request in requests])

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model says after each context."""
        asked = []
        for context, wanted in (request.args for request in requests):
            self.unknown |= set(wanted) - KNOWN
            asked.append((context, sampling_of(wanted)))
        return self._scores.continue_texts(asked)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the model's own template renders it."""
        messages = tuple(ChatMessage(one["role"], one["content"]) for one in chat_history)
        arguments = msgspec.json.encode({"add_generation_prompt": add_generation_prompt}).decode()
        prompt = ChatPrompt(
            messages, template_arguments=arguments, continue_final_message=not add_generation_prompt
        )
        return self._scores.model.tokenize(prompt)[1]


def sampling_of(wanted: dict[str, Any]) -> SamplingParams:
    """Return what a task's ``generation_kwargs`` mean: greedy unless it says ``do_sample``, or a temperature
    above 0. Raises UsageError for a value that is of another type.
    """
    try:
        return _sampling_of(wanted)
    except (TypeError, ValueError) as error:
        raise UsageError(f"a task's generation_kwargs are {wanted!r}: {error}; correct the task") from error


def _sampling_of(wanted: dict[str, Any]) -> SamplingParams:
    until = wanted.get("until") or []
    stop = [until] if isinstance(until, str) else until
    temperature = float(wanted.get("temperature", 1.0 if wanted.get("do_sample") else 0.0))
    sampled = bool(wanted.get("do_sample", temperature > 0)) and temperature > 0
    most = next(
        (wanted[name] for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
         if name in wanted),
        MOST_TOKENS,
    )  # fmt: skip
    return SamplingParams(
        temperature=temperature if sampled else 0.0,
        top_p=float(wanted.get("top_p", 1.0)) if sampled else 1.0,
        top_k=int(wanted.get("top_k", 0)) if sampled else 0,
        min_p=float(wanted.get("min_p", 0.0)) if sampled else 0.0,
        repetition_penalty=float(wanted.get("repetition_penalty", 1.0)),
        seed=int(wanted["seed"]) if "seed" in wanted else None,
        max_tokens=int(most),
        stop=tuple(text for text in stop if text),
    )
