"""A Hugging Face folder of a plain Llama with a byte-level tokenizer as a GGUF file, as llama.cpp converts
it.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
from safetensors.numpy import load_file

from llorch_export.config.hf import config_from_hf
from support.builders.checkpoints import add_metadata, gguf_metadata, gguf_tensor_name, permuted
from support.oracles.gguf_blocks import encoded


def convert(folder: Path, path: Path, kind: str | None = None, *, tensors_a_part: int = 0) -> Path:
    """Write ``folder``'s weights and tokenizer to ``path`` and return that, or the first of several parts; a
    head tied to the table is left out.

    kind: a K type for all matrices; None leaves them F32.
    tensors_a_part: where files are to be split; 0: one file.
    """
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config_from_hf(settings)
    writer = gguf.GGUFWriter(path, config.architecture, split_max_tensors=tensors_a_part)
    for key, value in (gguf_metadata(config) | _tokenizer(folder, settings["eos_token_id"])).items():
        add_metadata(writer, key, value)
    for name, weight in load_file(folder / "model.safetensors").items():
        stored, value = gguf_tensor_name(name, config.architecture), permuted(name, weight, config)
        if kind is None or value.ndim == 1:
            writer.add_tensor(stored, value)
        else:
            writer.add_tensor(stored, encoded(kind, value), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if tensors_a_part else path


def _tokenizer(folder: Path, eos: int) -> dict[str, object]:
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if id_ == eos else 1 for id_ in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": eos,
        "tokenizer.ggml.add_bos_token": False,
    }
