"""The process of onnxruntime-genai, on a folder of its model builder's: streams are one batch, which it runs
on a GPU; on a CPU it is asked for one stream.

Reads a :class:`bench_peers.protocol.Task` from stdin, prints measurements. Runs in the peer's own
environment.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import numpy as np
import onnxruntime_genai as og

from bench_peers.protocol import Arrivals, Engine, Task, encode, measure, parse_task

WEIGHTS: Final = "as its model builder stores them"


def _generator(model: Any, length: int, streams: int = 1) -> Any:
    params = og.GeneratorParams(model)
    # min_length: end tokens are not chosen before, which is how this engine ignores them
    params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=streams)
    return og.Generator(model, params)


def run(model: Any, task: Task, streams: int) -> Arrivals:
    """Prefill all prompts, then decode token by token."""
    prompts = task.prompts[:streams]
    generator = _generator(model, len(prompts[0]) + task.new_tokens, streams)
    arrivals = Arrivals(streams)
    generator.append_tokens(np.array(prompts, np.int32))
    for _ in range(task.new_tokens):
        generator.generate_next_token()
        generator.get_next_tokens()  # what a caller needs, and waits for on a GPU
        for stream in range(streams):
            arrivals.mark(stream)
    return arrivals


def first_piece(model: Any, task: Task) -> str:
    """Return the greedy token behind ``task.text``, as text."""
    tokenizer = og.Tokenizer(model)
    ids = tokenizer.encode(task.text)
    generator = _generator(model, len(ids) + 1)
    generator.append_tokens(np.asarray([ids], np.int32))
    generator.generate_next_token()
    return str(tokenizer.create_stream().decode(generator.get_next_tokens()[0]))


def write_logits(model: Any, task: Task) -> None:
    """Write the logits [positions, vocabulary] of ``task.logits_of``, computed as one prompt."""
    generator = _generator(model, len(task.logits_of) + 1)
    generator.append_tokens(np.array([task.logits_of], np.int32))
    np.save(task.logits_file, np.asarray(generator.get_output("logits"), np.float32)[0])


def main() -> None:
    """Do the task on stdin."""
    task = parse_task(sys.stdin.read())
    config = og.Config(task.model)
    options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": task.threads}}}}
    config.overlay(json.dumps(options))
    model = og.Model(config)
    if task.text:
        sys.stdout.write(first_piece(model, task))
        return
    if task.logits_of:
        write_logits(model, task)
        return
    engine = Engine("onnxruntime-genai", og.__version__, WEIGHTS, lambda streams: run(model, task, streams))
    for found in measure(engine, task):
        sys.stdout.write(encode(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
