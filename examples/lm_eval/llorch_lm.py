"""A model for lm-eval that is a running llorch worker: ``--model llorch --model_args
address=127.0.0.1:50051``.

lm-eval calls the three methods with its requests; :class:`worker_scores.WorkerScores` asks the worker. A
question that is longer than the worker's context ends the run with the worker's own error, where lm-eval's
models would cut its beginning off.
"""

from __future__ import annotations

from typing import Any, Final

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from worker_scores import WorkerScores, find_access

from llorch_serve.sampling.params import SamplingParams

MOST_TOKENS: Final = 256  # what lm-eval's own models generate where a task does not say


@register_model("llorch")
class LlorchLM(LM):
    """Implements lm-eval's interface.

    address: HOST:PORT of a worker. tls_ca, tls_cert, tls_key: PEM files, where it asks for TLS. A token is
        read from LLORCH_API_TOKEN.
    batch_size, max_batch_size, device: what lm-eval tells every model; the worker decides them itself.
        Anything else is refused, so that
    a misspelt tls_ca does not send a token in the clear.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
    ) -> None:
        super().__init__()
        self._worker = WorkerScores(address, find_access(tls_ca, tls_cert, tls_key))

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval keeps what it has rendered."""
        return self._worker.info.model_id

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) its log-likelihood, and whether greedy decoding says the
        same.
        """
        found = self._worker.log_likelihoods([request.args for request in requests])
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text."""
        found = self._worker.whole_texts([request.args[0] for request in requests])
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model says after each context."""
        asked = [(context, sampling_of(wanted)) for context, wanted in (request.args for request in requests)]
        found = self._worker.continue_texts(asked)
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return found


def sampling_of(wanted: dict[str, Any]) -> SamplingParams:
    """Return what a task's ``generation_kwargs`` mean: greedy unless it says ``do_sample``."""
    until = wanted.get("until") or []
    stop = [until] if isinstance(until, str) else until
    sampled = bool(wanted.get("do_sample", False))
    return SamplingParams(
        temperature=float(wanted.get("temperature", 1.0)) if sampled else 0.0,
        top_p=float(wanted["top_p"]) if sampled and "top_p" in wanted else 1.0,
        top_k=int(wanted["top_k"]) if sampled and "top_k" in wanted else 0,
        min_p=0.0,
        repetition_penalty=1.0,
        max_tokens=int(wanted.get("max_gen_toks", MOST_TOKENS)),
        stop=tuple(text for text in stop if text),
    )
