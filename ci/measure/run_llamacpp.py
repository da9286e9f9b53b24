"""Quantise and run GGUF files with llama.cpp: run by an interpreter that has llama-cpp-python, not by
pytest's.

usage: PYTHON run_llamacpp.py quantize SOURCE TARGET TYPE     TYPE as llama.cpp's own tool names it: Q4_K_M
       PYTHON run_llamacpp.py pure SOURCE TARGET TYPE <rows   every matrix in that one type, with an
       importance matrix that was drawn; a JSON object of the matrices' names and row lengths
       PYTHON run_llamacpp.py logits FILE OUTPUT <windows     a JSON array of arrays of token ids, each a
       context of its own
       PYTHON run_llamacpp.py held FILE CONTEXT NEW   a line of token ids on stdin; when NEW greedy tokens
       have followed them it prints "held" and waits for the end of stdin
       PYTHON run_llamacpp.py answer FILE TEXT NEW    as many greedy tokens as NEW that follow a text, each
       written to stdout as it comes
       PYTHON run_llamacpp.py tokens FILE PRE... <texts       a JSON array of texts; for each pre-tokenizer
       PRE, in place of the file's own ("" for that), a line of JSON: pre, adds_bos, and ids, a list for each
       text

Logits are an array [tokens, vocabulary] in float32, windows one after the other, in numpy's format. A source
that is quantised already is widened first.
"""

from __future__ import annotations

import ctypes
import json
import os
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


def pure(source: str, target: str, kind: str, matrices: dict[str, int]) -> None:
    """Write every matrix of ``source`` in the type that ``kind`` stands for, weighted by drawn importance.

    The types of one and two bits cannot be made without an importance matrix; a drawn one shows that files
    made with one are read, whatever it held.
    """
    rng = np.random.default_rng(0)
    drawn = {name: rng.uniform(0.5, 2, size).astype(np.float32) for name, size in matrices.items()}
    rows = [
        llama_cpp.llama_model_imatrix_data(
            name.encode(), values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), values.size
        )
        for name, values in drawn.items()
    ]
    end = llama_cpp.llama_model_imatrix_data(None, None, 0)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.pure, params.keep_split = True, "-00001-of-" in source
    params.imatrix = (llama_cpp.llama_model_imatrix_data * (len(rows) + 1))(*rows, end)
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
        sys.exit(f"llama.cpp cannot quantise {source} to {kind} alone")


def logits(path: str, output: str, windows: list[list[int]]) -> None:
    """Write the logits of every position, without rounding keys and values, since artifacts do not either.

    What llama.cpp says goes to stderr, where its reason for not taking a file is.
    """
    size = max(map(len, windows))
    model = llama_cpp.Llama(
        path,
        n_ctx=size,
        n_batch=size,
        n_gpu_layers=0,
        logits_all=True,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        # Negative: as the file says. Those are not the defaults of the Python package.
        yarn_attn_factor=-1.0,
        yarn_beta_fast=-1.0,
        yarn_beta_slow=-1.0,
    )
    found = []
    for window in windows:
        model.reset()
        model.eval(window)
        found.append(np.array(model.scores[: len(window)], np.float32))
    np.save(output, np.concatenate(found))


def tokens(path: str, pre: str, texts: list[str]) -> dict[str, object]:
    """Return the ids of texts, in which no special token is looked for, and whether BOS would come first."""
    changes: dict[str, bool | int | float | str] = {"tokenizer.ggml.pre": pre} if pre else {}
    model = llama_cpp.Llama(path, vocab_only=True, kv_overrides=changes, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    ids = [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]
    return {"pre": pre, "adds_bos": llama_cpp.llama_vocab_get_add_bos(vocabulary), "ids": ids}


def answer(path: str, text: str, new_tokens: int) -> None:
    """Continue a text greedily on all cores, over llama-cpp-python's usual 512 tokens of context."""
    llama = llama_cpp.Llama(path, n_threads=len(os.sched_getaffinity(0)), verbose=False)
    ids = llama.tokenize(text.encode(), special=True)
    for number, token in enumerate(llama.generate(ids, temp=0.0, repeat_penalty=1.0), start=1):
        sys.stdout.buffer.write(llama.detokenize([token], prev_tokens=ids))
        sys.stdout.buffer.flush()
        if number == new_tokens:
            break


def held(path: str, context: int, new_tokens: int) -> None:
    """Answer the prompt on stdin greedily, then keep what it takes until stdin ends. Threads: OpenMP's."""
    prompt = [int(token) for token in sys.stdin.readline().split()]
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = context
    running = llama_cpp.llama_init_from_model(model, params)
    sampler = llama_cpp.llama_sampler_init_greedy()
    for _ in range(new_tokens):
        ids = (llama_cpp.llama_token * len(prompt))(*prompt)
        if llama_cpp.llama_decode(running, llama_cpp.llama_batch_get_one(ids, len(prompt))):
            sys.exit("llama.cpp cannot decode the prompt")
        prompt = [llama_cpp.llama_sampler_sample(sampler, running, -1)]
    print("held", flush=True)  # noqa: T201 - whoever measures waits for it
    sys.stdin.read()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["quantize", source, target, kind]:
            quantize(source, target, kind)
        case ["pure", source, target, kind]:
            pure(source, target, kind, json.load(sys.stdin))
        case ["logits", path, output]:
            logits(path, output, json.load(sys.stdin))
        case ["held", path, context, new_tokens]:
            held(path, int(context), int(new_tokens))
        case ["answer", path, text, new_tokens]:
            answer(path, text, int(new_tokens))
        case ["tokens", path, *pre]:
            texts = json.load(sys.stdin)
            for name in pre:
                print(json.dumps(tokens(path, name, texts)))  # noqa: T201 - a script's output
        case _:
            sys.exit(__doc__)
