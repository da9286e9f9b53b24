"""Compare published tokenizers, as they are read and rebuilt here, with the libraries they were made for.

usage: ci/measurement real_tokenizers COUNT [--mistral PYTHON] [--llama-cpp PYTHON] FILE...

Each FILE is one of: a ``tokenizer.json`` (rebuilt from its vocabulary as a GGUF file holds it, and for Llama
3 from a file of tiktoken; against tokenizers, the library, on the file itself), a ``tekken.json`` or a
``tokenizer.model.vN`` of Mistral's (against mistral-common, by the interpreter PYTHON), or a ``.gguf`` with a
vocabulary (against llama.cpp, likewise). Prints for each how many of COUNT texts in many scripts get other
ids, and of how many the text, streamed id by id, differs from the text decoded at once.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers

from llorch_export.checkpoint.gguf_header import read_header
from llorch_export.tokenizer.bpe import byte_level_bpe, sentencepiece_bpe
from llorch_export.tokenizer.gguf_tokenizer import tokenizer_from_gguf
from llorch_export.tokenizer.ranked_tokens import byte_level_text
from llorch_export.tokenizer.sentencepiece_model import read_sentencepiece
from llorch_export.tokenizer.splitting import SPLITTING_RULES
from llorch_export.tokenizer.tekken import read_tekken
from llorch_export.tokenizer.tiktoken_file import read_tiktoken
from llorch_serve.text.tokenizer import TextStream, Tokenizer
from support.builders.multilingual import multilingual_texts

_HERE: Final = Path(__file__).parent
_ROWS: Final = 2**20  # more than any embedding has
_Ids = Sequence[Sequence[int]]
# A tokenizer's name, how it was rebuilt, and how it is asked for; the last one asks the library it is from.
_Case = tuple[str, Callable[[], Tokenizer], Callable[[list[str]], _Ids]]


def main() -> None:
    """Compare, and print a line for each tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--mistral")
    parser.add_argument("--llama-cpp")
    given = parser.parse_args()
    texts = [text for text in multilingual_texts(given.count, seed=5) if text]
    for path in given.files:
        for name, build, ask in _cases(path, given.mistral, given.llama_cpp):
            _compare(name, build(), texts, ask(texts))


def _compare(name: str, tokenizer: Tokenizer, texts: list[str], expected: _Ids) -> None:
    differing, streamed, composed = 0, 0, 0
    for text, right in zip(texts, expected, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids != tuple(right):
            differing += 1
            composed += unicodedata.normalize("NFC", text) != text
        streamed += streamed_text(tokenizer, ids) != tokenizer.decode(ids, keep_special_tokens=False)
    print(  # noqa: T201 - a script's output
        f"{name}: {len(texts)} texts, {differing} with other ids ({composed} of them not in NFC), {streamed} "
        f"streamed otherwise",
        flush=True,
    )


def streamed_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids that come one by one."""
    stream = TextStream(tokenizer)
    return "".join(stream.push(token_id)[0] for token_id in ids) + stream.finish()


def _cases(path: Path, mistral: str | None, llama_cpp: str | None) -> Iterator[_Case]:
    if path.suffix == ".gguf":
        if llama_cpp is not None:
            asked = [llama_cpp, _HERE / "run_llamacpp.py", "tokens", path, ""]
            yield path.name, lambda: _from_gguf(dict(read_header(path).metadata)), _asking(asked, "ids")
    elif path.name == "tokenizer.json":
        yield from _cases_of_json(path)
    elif mistral is not None:
        asked = [mistral, _HERE / "run_mistral.py", path]
        yield path.name, lambda: _from_mistral(path), _asking(asked, None)


def _asking(command: Sequence[str | Path], key: str | None) -> Callable[[list[str]], _Ids]:
    def ask(texts: list[str]) -> _Ids:
        run = subprocess.run(
            [*command], input=json.dumps(texts), stdout=subprocess.PIPE, text=True, check=True
        )
        answer = json.loads(run.stdout)
        ids: _Ids = answer if key is None else answer[key]
        return ids

    return ask


def _from_mistral(path: Path) -> Tokenizer:
    options: dict[str, Any] = {
        "add_bos": False, "add_eos": False, "vocab_size": _ROWS, "origin": path.name
    }  # fmt: skip
    if path.suffix == ".json":
        built = byte_level_bpe(read_tekken(path.read_bytes(), **options))
    else:
        built = sentencepiece_bpe(read_sentencepiece(path.read_bytes(), **options))
    return Tokenizer.from_json(built.to_str().encode(), origin=path.name)


def _from_gguf(metadata: dict[str, object]) -> Tokenizer:
    assets = tokenizer_from_gguf(metadata, vocab_size=_ROWS, origin="vocabulary")
    return Tokenizer.from_json(assets.tokenizer_json, origin="vocabulary")


def _cases_of_json(path: Path) -> Iterator[_Case]:
    document = json.loads(path.read_bytes())
    library = tokenizers.Tokenizer.from_str(json.dumps(document))

    def ask(texts: list[str]) -> _Ids:
        return [found.ids for found in library.encode_batch(texts, add_special_tokens=False)]

    name = path.parent.parent.parent.name if path.parent.name == "models" else path.parent.name
    yield f"{name} as it is", lambda: Tokenizer.from_json(path.read_bytes(), origin=name), ask
    metadata = _as_gguf(document)
    yield f"{name} as GGUF, pre {metadata.get('tokenizer.ggml.pre')}", lambda: _from_gguf(metadata), ask
    if metadata.get("tokenizer.ggml.pre") == "llama-bpe":
        yield f"{name} as tiktoken", lambda: _from_tiktoken(document), ask


def _as_gguf(document: dict[str, Any]) -> dict[str, object]:
    """Return a tokenizer.json's vocabulary as the metadata that conversion to GGUF writes for it."""
    model = document["model"]
    added = {entry["id"]: entry for entry in document["added_tokens"]}
    texts = {token_id: text for text, token_id in model["vocab"].items()}
    texts |= {token_id: entry["content"] for token_id, entry in added.items()}
    tokens = [texts.get(token_id, f"[PAD{token_id}]") for token_id in range(max(texts) + 1)]
    kinds = [1 if token_id in texts else 5 for token_id in range(len(tokens))]
    for token_id, entry in added.items():
        kinds[token_id] = 3 if entry["special"] else 4
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    common = {"tokens": tokens, "token_type": kinds, "add_bos_token": False}
    if model.get("byte_fallback"):
        kinds[:] = [
            6 if text.startswith("<0x") and kind == 1 else kind
            for text, kind in zip(tokens, kinds, strict=True)
        ]
        # A piece is as good as the first merge that makes it; SentencePiece's own scores are of that kind.
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), rank)
        scores = [-float(ranks.get(text, len(merges))) for text in tokens]
        found = {"model": "llama", "scores": scores, **common}
    else:
        found = {"model": "gpt2", "pre": _pre(document), "merges": merges, **common}
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def _pre(document: dict[str, Any]) -> str:
    """Return the first name whose rules are those of a tokenizer.json."""
    steps = document["pre_tokenizer"]["pretokenizers"]
    written = (step["pattern"]["Regex"] for step in steps if step["type"] == "Split")
    patterns = tuple(pattern.replace("\r", r"\r").replace("\n", r"\n") for pattern in written)
    first = bool(document["model"].get("ignore_merges"))
    names = [name for name, rules in SPLITTING_RULES.items() if rules.patterns == patterns]
    return next((name for name in names if SPLITTING_RULES[name].whole_words_first == first), names[0])


def _from_tiktoken(document: dict[str, Any]) -> Tokenizer:
    characters = {byte_level_text(bytes([byte])): byte for byte in range(256)}
    vocabulary = sorted(document["model"]["vocab"].items(), key=lambda entry: entry[1])
    lines = [
        base64.b64encode(bytes(characters[char] for char in text)) + f" {rank}\n".encode()
        for text, rank in vocabulary
    ]
    names = {entry["content"] for entry in document["added_tokens"]}
    read = read_tiktoken(
        b"".join(lines), {}, since_3_1="<|eom_id|>" in names, add_bos=False, add_eos=False,
        vocab_size=_ROWS, origin="tokenizer.model",
    )  # fmt: skip
    expected = [entry["content"] for entry in sorted(document["added_tokens"], key=lambda entry: entry["id"])]
    assert list(read.tokens[-len(expected) :]) == expected
    return Tokenizer.from_json(byte_level_bpe(read).to_str().encode(), origin="tokenizer.model")


if __name__ == "__main__":
    main()
