"""Quantise and run GGUF files with llama.cpp: run by an interpreter that has llama-cpp-python, not by
pytest's.

usage: PYTHON run_llamacpp.py quantize SOURCE TARGET TYPE     TYPE as llama.cpp's own tool names it: Q4_K_M
       PYTHON run_llamacpp.py logits FILE OUTPUT <windows     a JSON array of arrays of token ids, each a
       context of its own

Logits are an array [tokens, vocabulary] in float32, windows one after the other, in numpy's format. A source
that is quantised already is widened first.
"""

from __future__ import annotations

import json
import sys

import llama_cpp
import numpy as np


def quantize(source: str, target: str, kind: str) -> None:
    """Write ``source`` in the mix of types that ``kind`` stands for."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    failed = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if failed:
        sys.exit(f"llama.cpp cannot quantise {source} to {kind}")


def logits(path: str, output: str, windows: list[list[int]]) -> None:
    """Write the logits of every position, without rounding keys and values, since artifacts do not either."""
    size = max(map(len, windows))
    model = llama_cpp.Llama(
        path,
        n_ctx=size,
        n_batch=size,
        n_gpu_layers=0,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    found = []
    for window in windows:
        model.reset()
        model.eval(window)
        found.append(np.array(model.scores[: len(window)], np.float32))
    np.save(output, np.concatenate(found))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["quantize", source, target, kind]:
            quantize(source, target, kind)
        case ["logits", path, output]:
            logits(path, output, json.load(sys.stdin))
        case _:
            sys.exit(__doc__)
