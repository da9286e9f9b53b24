"""A model of lm-eval that asks ours. It needs lm-eval, so ``tasks.py`` imports it when tasks are run."""

from __future__ import annotations

import msgspec
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from llorch_serve.evaluation.scores import ModelScores
from llorch_serve.evaluation.task_sampling import KNOWN, sampling_of
from llorch_serve.requests import ChatMessage, ChatPrompt


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
