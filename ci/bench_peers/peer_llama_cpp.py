"""The process of llama.cpp, through llama-cpp-python's low-level batches: no Python sampling, no copied
logits.

Reads a :class:`bench_peers.protocol.Task` from stdin, prints measurements. Runs in the peer's own
environment.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np

from bench_peers.protocol import Arrivals, Engine, Task, encode, measure, parse_task

_BATCH: Final = 512
_ALL_LAYERS: Final = 999
_INSTRUCTIONS: Final = (
    "AVX2",
    "AVX_VNNI",
    "AVX512",
    "AVX512_VNNI",
    "AVX512_BF16",
    "AMX_INT8",
    "DOTPROD",
    "MATMUL_INT8",
)
_CACHES: Final = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0}
_quiet = llama_cpp.llama_log_callback(
    lambda level, text, data: None
)  # kept alive: the library holds a pointer


class Context:
    """One llama.cpp context that fits a number of sequences, and a greedy sampler.

    cache: one of ``_CACHES``, with which flash attention is on; empty: the library's defaults.
    """

    def __init__(self, model: Any, threads: int, *, sequences: int, length: int, cache: str) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * -(-length // 256) * 256  # divided evenly, in the library's own padding
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = threads
        if cache:
            params.type_k = params.type_v = _CACHES[cache]
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise MemoryError(f"llama.cpp gave no context for {sequences} sequences of {length} tokens")
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._sampler = llama_cpp.llama_sampler_init_greedy()

    def clear(self) -> None:
        """Forget all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def copy(self, source: int, target: int) -> None:
        """Copy a sequence's keys and values to another, which has memory of its own."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_seq_cp(memory, source, target, -1, -1)

    def close(self) -> None:
        """Free the context and what belongs to it."""
        llama_cpp.llama_sampler_free(self._sampler)
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute one batch of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for row, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = wanted
        code = llama_cpp.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode ended with {code}")

    def likeliest(self, row: int) -> int:
        """Return the greedy token of a batch's row."""
        return int(llama_cpp.llama_sampler_sample(self._sampler, self._context, row))

    def logits(self, row: int, vocab_size: int) -> np.ndarray:
        """Return a copy of a batch's row of logits."""
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, (vocab_size,)).copy()


class Runner:
    """Runs the task; the context of the last number of streams is kept for the next run with as many."""

    def __init__(self, model: Any, task: Task) -> None:
        self._model, self._task = model, task
        self._context: Context | None = None
        self._streams = 0

    def run(self, streams: int) -> Arrivals:
        """Prefill every stream, then decode all of them together."""
        task, context = self._task, self._fitting(streams)
        arrivals = Arrivals(streams)
        last: list[int] = []
        for stream, prompt in enumerate(task.prompts[:streams]):
            if task.filled and stream:
                context.copy(0, stream)
                last.append(last[0])
                continue
            end = len(prompt) - 1
            for start in range(0, len(prompt), _BATCH):
                piece = prompt[start : start + _BATCH]
                context.decode(
                    [(token, start + i, stream, start + i == end) for i, token in enumerate(piece)]
                )
            last.append(context.likeliest(-1))
            if not task.filled:
                arrivals.mark(stream)
        if task.filled:
            arrivals = Arrivals(streams)
            for stream in range(streams):
                arrivals.mark(stream)
        for step in range(task.new_tokens - 1):
            position = len(task.prompts[0]) + step
            context.decode([(token, position, stream, True) for stream, token in enumerate(last)])
            last = [context.likeliest(row) for row in range(streams)]
            for stream in range(streams):
                arrivals.mark(stream)
        return arrivals

    def _fitting(self, streams: int) -> Context:
        if self._context is None or streams != self._streams:
            if self._context is not None:
                self._context.close()
            length = len(self._task.prompts[0]) + self._task.new_tokens
            self._context = Context(
                self._model, self._task.threads, sequences=streams, length=length, cache=self._task.cache
            )
            self._streams = streams
        self._context.clear()
        return self._context


def write_logits(model: Any, task: Task) -> None:
    """Write the logits [positions, vocabulary] of ``task.logits_of``, computed in batches as a prompt is."""
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    context = Context(model, task.threads, sequences=1, length=len(task.logits_of), cache=task.cache)
    rows = []
    for start in range(0, len(task.logits_of), _BATCH):
        piece = task.logits_of[start : start + _BATCH]
        context.decode([(token, start + i, 0, True) for i, token in enumerate(piece)])
        rows += [context.logits(row, vocab_size) for row in range(len(piece))]
    np.save(task.logits_file, np.stack(rows))
    context.close()


def first_piece(model: Any, task: Task) -> bytes:
    """Return the greedy token behind ``task.text``, as text."""
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    text = task.text.encode()
    ids = (llama_cpp.llama_token * (len(text) + 1))()
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), ids, len(ids), True, False)
    context = Context(model, task.threads, sequences=1, length=count, cache=task.cache)
    context.decode([(token, at, 0, at == count - 1) for at, token in enumerate(ids[:count])])
    piece = ctypes.create_string_buffer(256)
    size = llama_cpp.llama_token_to_piece(vocabulary, context.likeliest(-1), piece, len(piece), 0, True)
    return piece.raw[:size]


def version() -> str:
    """Return the package's version, and the instruction sets that the library was built for and tells."""
    told = llama_cpp.llama_print_system_info().decode()
    sets = [name for name in _INSTRUCTIONS if f" {name} = 1 " in told]
    return f"llama-cpp-python {llama_cpp.__version__}" + (f" ({', '.join(sets)})" if sets else "")


def main() -> None:
    """Do the task on stdin."""
    task = parse_task(sys.stdin.read())
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p())
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = _ALL_LAYERS  # where the library was built for a GPU
    model = llama_cpp.llama_model_load_from_file(task.model.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {task.model}")
    if task.text:
        sys.stdout.buffer.write(first_piece(model, task))
        return
    if task.logits_of:
        write_logits(model, task)
        return
    weights = f"{Path(task.model).suffixes[0].lstrip('.')}, the source itself"
    engine = Engine(
        "llama.cpp",
        version(),
        weights,
        Runner(model, task).run,
    )
    for found in measure(engine, task):
        sys.stdout.write(encode(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
