"""lm-eval over both of OpenAI's routes, on a task of three local lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
from lm_eval.tasks import TaskManager
from shown import REAL, SCRIPTED, TALK, Served, refusal, row

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
    "a refusal ends the run",
    lambda: refusal(
        lambda: evaluate("local-chat-completions", SCRIPTED, "chat/completions", gen_kwargs="temperature=9")
    ),
    lambda saw: saw.startswith("HTTPError: 400 Client Error") and "/v1/chat/completions" in saw,
)
