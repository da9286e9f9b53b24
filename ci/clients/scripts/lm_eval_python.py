"""lm-eval over both of OpenAI's routes, on a task of three local lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from shown import CAPITAL, REAL, SCRIPTED, TALK, Served, posted, refusal, row

folder = Path("lm_eval_task").resolve()
folder.mkdir(exist_ok=True)
lines = [{"question": f"What is the capital of France? ({n})", "answer": TALK} for n in range(3)]
(folder / "lines.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
(folder / "capital.yaml").write_text(
    json.dumps(
        {
            "task": "capital",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "lines.jsonl")}},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 40, "temperature": 0},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        }
    ),
    encoding="utf-8",
)


def evaluate(kind: str, served: Served, route: str, **more: object) -> dict:
    arguments = f"model={served.model},base_url={served.url}/{route},tokenizer_backend=None,max_retries=1"
    found = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments,
        tasks=["capital"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=kind == "local-chat-completions",
        bootstrap_iters=0,
        **more,
    )
    return found["results"]["capital"]


def likelihoods() -> list[tuple[float, bool, float, bool]]:
    """Return for continuations of ids what the client makes of an echo, and what /v1/score says of them."""
    client = LocalCompletionsAPI(
        model=REAL.model, base_url=f"{REAL.url}/completions", tokenizer_backend=None, max_retries=1
    )
    # It sends ids where it has a tokenizer. Here the worker has split the texts, and none is needed.
    client.tokenizer, client.tokenized_requests = posted, True
    messages = [{"role": "user", "content": CAPITAL}]
    context = posted(REAL, "/tokenize", messages=messages)["tokens"]
    answers = (TALK, "The capital of France is Paris.", f"{TALK} It is", "Rome", "!")
    ids = [posted(REAL, "/tokenize", prompt=answer)["tokens"] for answer in answers]
    found = client._loglikelihood_tokens([(("", str(one)), context, one) for one in ids])
    scores = posted(REAL, "/v1/score", context=context, continuations=ids)["data"]
    return [(*mine, score["logprob"], score["is_greedy"]) for mine, score in zip(found, scores, strict=True)]


row(
    "plain",
    lambda: evaluate("local-chat-completions", SCRIPTED, "chat/completions"),
    lambda saw: saw["exact_match,none"] == 1.0,
)
row(
    "completions",
    lambda: evaluate("local-completions", REAL, "completions"),
    lambda saw: "exact_match,none" in saw,
)
row(
    "likelihoods",
    likelihoods,
    lambda saw: all(abs(a - b) < 1e-3 and one is other for a, one, b, other in saw),
)
row(
    "a refusal ends the run",
    lambda: refusal(
        lambda: evaluate("local-chat-completions", SCRIPTED, "chat/completions", gen_kwargs="temperature=9")
    ),
    lambda saw: saw.startswith("HTTPError: 400 Client Error") and "/v1/chat/completions" in saw,
)
