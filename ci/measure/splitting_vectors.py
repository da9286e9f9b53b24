"""Write ``tests/data/published/llama_cpp_splitting.jsonl``: what llama.cpp makes of texts with each of its
pre-tokenizers.

usage: ci/measurement splitting_vectors PYTHON >tests/data/published/llama_cpp_splitting.jsonl

PYTHON is an interpreter that has llama-cpp-python. The vocabulary is that of ``paired_bytes``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import gguf

from llorch_export.tokenizer.splitting import SPLITTING_RULES
from support.builders.checkpoints import add_metadata
from support.builders.paired_bytes import paired_bytes

_HERE: Final = Path(__file__).parent
TEXTS: Final = (
    "ab 12345's  x!\n",
    "I've SEEN'LL we'd 'Tis O'Neil's don'T 'same 'llama '\u017fo",
    "HelloWorld fooBar XMLHttpRequest iPhone McDonald's",
    "1234567 3.14 2024-01-31 x86_64 0xFF 12 345 6789 1e10",
    "\u00bd \u2167 \u0663\u0664\u0665 \u4e09 \u00b2 \u0e51\u0e52\u0e53\u0e54",
    "def f(x):\n\treturn {x: [1, 2]}  # ok\n\n\n  pass\r\n",
    "  lead  trail  \r\n \n  \t x ",
    "\u6771\u4eac\u30bf\u30ef\u30fc \uc548\ub155\ud558\uc138\uc694 "
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\uff01 \u3105\u3106 \u3131\u3132",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\u0645\u0631\u062d\u064e\u0628\u0627\u060c \u05e9\u05c1\u05dc\u05d5\u05dd",
    "Gr\u00f6\u00dfe na\u00efve \u00c9COLE \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\u041c\u0418\u0420 \u0391\u03b8\u03ae\u03bd\u03b1 \u0531\u0580\u0574",
    "\U0001f642\U0001f680\U0001f469\u200d\U0001f467 \u2713 \u2192 \u20ac $5 100% <=> ~^|",
    'a/b//c\\d /// https://x.y/?q=1&r=2\n/n ...!!!  (foo) [bar] {baz} "q" `c`/\n',
    "<sentinel:12>IMGIMGABZ <|x|> a_b __init__ .x -y",
    "e\u0301 a\u0308 \u00a0nbsp\u3000ideo\u2028ls\u0085nel",
    "zqxj zqxj",
    "x" + " " * 21 + "y" + "\n" * 3 + "z\r\r\n\n \t\n",
)


def main(python: str) -> None:
    """Ask llama.cpp, and print a line of texts, then one for each set of names with the same answers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.gguf"
        _write(path)
        asked = subprocess.run(
            [python, _HERE / "run_llamacpp.py", "tokens", path, *SPLITTING_RULES],
            input=json.dumps(TEXTS),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    names: dict[str, list[str]] = {}
    for line in asked.stdout.splitlines():
        answer = json.loads(line)
        name = answer.pop("pre")
        names.setdefault(json.dumps(answer, separators=(",", ":")), []).append(name)
    lines = [{"texts": TEXTS}, *({"pre": found, **json.loads(same)} for same, found in names.items())]
    for line in lines:
        sys.stdout.write(json.dumps(line, separators=(",", ":")) + "\n")


def _write(path: Path) -> None:
    """Write a GGUF file with the vocabulary and as much of a model as llama.cpp wants to see."""
    writer = gguf.GGUFWriter(path, "llama")
    shape = (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
    )
    metadata = {f"llama.{name}": 8 for name in shape} | {"llama.attention.layer_norm_rms_epsilon": 1e-5}
    for key, value in (metadata | paired_bytes() | {"tokenizer.ggml.pre": "gpt-2"}).items():
        add_metadata(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(sys.argv[1])
