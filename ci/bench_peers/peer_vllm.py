"""The process of vLLM, on a Hugging Face folder in float16, by its engine's own steps.

Reads a :class:`bench_peers.protocol.Task` from stdin, prints measurements. Runs in the peer's own
environment.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import vllm

from bench_peers.protocol import Arrivals, Engine, Task, encode, measure, parse_task


def run(engine: Any, task: Task, streams: int) -> Arrivals:
    """Add all prompts at once and step until each has its tokens."""
    params = vllm.SamplingParams(
        temperature=0, max_tokens=task.new_tokens, min_tokens=task.new_tokens, ignore_eos=True
    )
    arrivals, told = Arrivals(streams), [0] * streams
    for stream, prompt in enumerate(task.prompts[:streams]):
        engine.add_request(str(stream), {"prompt_token_ids": list(prompt)}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            stream, count = int(output.request_id), len(output.outputs[0].token_ids)
            arrivals.mark(stream, count - told[stream])
            told[stream] = count
    return arrivals


def main() -> None:
    """Do the task on stdin."""
    task = parse_task(sys.stdin.read())
    if task.logits_of or task.text or task.filled:
        raise ValueError("vLLM is asked for speeds with prompts alone; it gives no logits of whole rows")
    # stdout is for measurements; vLLM's own processes write their log there.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    engine = vllm.LLM(
        task.model,
        dtype="float16",
        max_model_len=len(task.prompts[0]) + task.new_tokens,
        max_num_seqs=max(task.streams),
        enable_prefix_caching=False,
    ).llm_engine
    own = Engine("vLLM", vllm.__version__, "float16", lambda streams: run(engine, task, streams))
    for found in measure(own, task):
        answers.write(encode(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
