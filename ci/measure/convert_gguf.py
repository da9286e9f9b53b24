"""Write GGUF files by llama.cpp's own converter: run with its sources, not by pytest.

usage: PYTHON convert_gguf.py SOURCES <pairs     a JSON array of pairs: a Hugging Face folder, and the file

For each comes a line of JSON: null, or why the converter does not take the folder. SOURCES is a folder
of llama.cpp with ``conversion`` and ``gguf-py``. Only the vocabulary is not the converter's work: it knows
published tokenizers by their hash, and those of tests are none of them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any


def converted(folder: Path, target: Path) -> str | None:
    """Write ``target`` in F32, and return None; or why that cannot be done."""
    import conversion
    import gguf

    try:
        # transformers drops keys that the converter reads, of configs that came with code of their own.
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = {**stated, **conversion.ModelBase.load_hparams(folder, False)}
        name = conversion.get_model_architecture(settings, conversion.ModelType.TEXT)
        model = conversion.get_model_class(name)
        for kind in subclasses(conversion.TextModel):
            kind.set_vocab = write_vocabulary
        model(folder, gguf.LlamaFileType.ALL_F32, target, hparams=settings).write()
    except Exception as error:  # noqa: BLE001 - whatever it cannot do is a line of the table
        return f"{type(error).__name__}: {error}"
    return None


def subclasses(kind: Any) -> list[Any]:
    """Return a class and all that are made from it."""
    return [kind, *(found for below in kind.__subclasses__() for found in subclasses(below))]


def write_vocabulary(self: Any) -> None:
    """Write the tokens of ``tokenizer.json``; takes the place of ``set_vocab`` in the converter's classes."""
    model = json.loads((self.dir_model / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("gpt-2")
    self.gguf_writer.add_token_list(tokens)
    self.gguf_writer.add_token_types([1] * len(tokens))
    self.gguf_writer.add_token_merges([" ".join(pair) for pair in model["merges"]])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/gguf-py"]
    logging.disable(logging.WARNING)
    for source, path in json.load(sys.stdin):
        print(json.dumps(converted(Path(source), Path(path))), flush=True)  # noqa: T201 - a script's output
