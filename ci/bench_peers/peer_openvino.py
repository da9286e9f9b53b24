"""The process of OpenVINO GenAI, on its continuous batching pipeline and an int4 IR of optimum-intel.

Reads a :class:`bench_peers.protocol.Task` from stdin, prints measurements. Runs in the peer's own
environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino
import openvino_genai

from bench_peers.protocol import Arrivals, Engine, Task, encode, measure, parse_task

WEIGHTS: Final = "int4 groups of 64, symmetric"
_CACHE_GB: Final = 2
_TAIL: Final = 16
"""Tokens behind a filled context, which are computed anew."""
_BATCHED_TOKENS: Final = 512


class Pipeline:
    """The pipeline, with prefix caching where contexts are filled before; else every prompt is to be
    computed.
    """

    def __init__(self, task: Task) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = task.filled
        scheduler.max_num_batched_tokens = _BATCHED_TOKENS
        scheduler.cache_size = _CACHE_GB
        properties: dict[str, int | str] = {"INFERENCE_NUM_THREADS": task.threads}
        if task.cache:
            properties["KV_CACHE_PRECISION"] = task.cache
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(task.model, scheduler, "CPU", properties)
        self._task = task
        self._next_id = 0

    def run(self, streams: int) -> Arrivals:
        """Add all requests, then step until they are done."""
        prompts = self._task.prompts[:streams]
        if self._task.filled:
            self._answer(prompts, self._config_of(1))
            prompts = tuple((*ids, *ids[1 : _TAIL + 1]) for ids in prompts)
        return self._answer(prompts, self._config_of(self._task.new_tokens))

    def _config_of(self, new_tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        return config

    def _answer(self, prompts: Sequence[Sequence[int]], config: Any) -> Arrivals:
        tensors = [openvino.Tensor(np.array([ids], np.int64)) for ids in prompts]
        arrivals = Arrivals(len(prompts))
        handles = []
        for tensor in tensors:
            handles.append(self._pipeline.add_request(self._next_id, tensor, config))
            self._next_id += 1
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for stream, handle in enumerate(handles):
                if handle.can_read():
                    arrivals.mark(stream, _tokens(handle.read()))
        return arrivals


def _tokens(outputs: Any) -> int:
    return sum(len(output.generated_ids) for output in outputs.values())


def print_first_piece(task: Task) -> None:
    """Print the greedy token behind ``task.text`` and end this process."""
    pipeline = openvino_genai.LLMPipeline(task.model, "CPU", {"INFERENCE_NUM_THREADS": task.threads})
    sys.stdout.write(
        str(pipeline.generate(task.text, max_new_tokens=1, do_sample=False, apply_chat_template=False))
    )
    sys.stdout.flush()
    os._exit(0)  # its threads sometimes hang when the interpreter takes them down


def write_logits(task: Task) -> None:
    """Write the logits [positions, vocabulary] of ``task.logits_of``; the IR by itself, since the pipeline
    gives none.
    """
    core = openvino.Core()
    model = core.compile_model(
        Path(task.model) / "openvino_model.xml", "CPU", {"INFERENCE_NUM_THREADS": task.threads}
    )
    count = len(task.logits_of)
    inputs: dict[str, np.ndarray] = {
        "input_ids": np.array([task.logits_of], np.int64),
        "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count, dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    request = model.create_infer_request()
    result = request.infer(
        {name: inputs[name] for port in model.inputs for name in port.names & inputs.keys()}
    )
    np.save(task.logits_file, np.asarray(result["logits"], np.float32)[0])


def main() -> None:
    """Do the task on stdin."""
    task = parse_task(sys.stdin.read())
    if task.text:
        print_first_piece(task)
    if task.logits_of:
        write_logits(task)
        return
    pipeline = Pipeline(task)
    engine = Engine("OpenVINO GenAI", openvino_genai.__version__, WEIGHTS, pipeline.run)
    for found in measure(engine, task):
        sys.stdout.write(encode(found) + "\n")
        sys.stdout.flush()
    os._exit(0)  # its threads sometimes hang when the interpreter takes them down


if __name__ == "__main__":
    main()
