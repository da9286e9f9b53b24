"""Vocabularies as tiktoken works with them: ``tekken.json`` of Mistral, ``tokenizer.model`` of Llama 3."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.source.open import open_checkpoint
from llorch_export.tokenizer import tiktoken_file
from llorch_export.tokenizer.ranked_tokens import check_ranked, merges_by_rank
from llorch_export.tokenizer.reading import tokenizer_from_folder
from llorch_export.tokenizer.splitting import SPLITTING_RULES
from llorch_export.tokenizer.vocabulary_files import vocabulary_files
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import VOCAB_SIZE, write_hf_folder
from support.builders.multilingual import multilingual_texts
from support.builders.ranked_tokens import SPECIAL, TOKENS, tekken_document

DATA = Path(__file__).parents[1] / "data" / "published"
PUBLISHED = [json.loads(line) for line in (DATA / "llama_3_special_tokens.jsonl").read_text().splitlines()]
TEKKEN = SPLITTING_RULES["tekken"].patterns[0]


def _folder(path: Path, files: dict[str, bytes], tokenizer_config: dict[str, object] | None = None) -> Path:
    folder = write_hf_folder(path, tokenizer=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config or {}))
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def _read(folder: Path) -> Tokenizer:
    return Tokenizer.from_buffer(open_checkpoint(str(folder)).tokenizer.tokenizer_json)


def _refusal(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ranked_ids(text: str, pattern: str) -> Iterator[int]:
    """Yield ranks by tiktoken's definition: those neighbours in a piece join whose union ranks first."""
    ranks = {token: rank for rank, token in enumerate(TOKENS)}
    for piece in regex.findall(pattern, text):
        data = piece.encode()
        if data in ranks:
            yield ranks[data]
            continue
        parts = [bytes([byte]) for byte in data]
        while True:
            pairs = [
                (ranks[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks
            ]
            if not pairs:
                break
            at = min(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        yield from (ranks[part] for part in parts)


def test_tekken_gives_the_ids_of_its_definition(tmp_path: Path) -> None:
    tokenizer = _read(_folder(tmp_path / "m", {"tekken.json": json.dumps(tekken_document()).encode()}))
    for text in ("the weather", " the ther weathered\n\nllama 12", "п пё п", *multilingual_texts(300)):
        expected = [1, *(SPECIAL + rank for rank in ranked_ids(text, TEKKEN))]
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected) == text


def test_special_tokens_of_tekken_come_first(tmp_path: Path) -> None:
    named = [
        {"rank": place, "token_str": text} for place, text in enumerate(["<unk>", "<s>", "</s>", "[THINK]"])
    ]
    folder = _folder(
        tmp_path / "m", {"tekken.json": json.dumps(tekken_document(special_tokens=named)).encode()}
    )
    tokenizer = _read(folder)
    assert [tokenizer.id_to_token(token_id) for token_id in (1, 2, 3, 4, 19)] == [
        "<s>", "</s>", "[THINK]", "<SPECIAL_4>", "<SPECIAL_19>"
    ]  # fmt: skip
    assert tokenizer.encode("[THINK]</s>").ids == [1, 3, 2]
    old = _read(_folder(tmp_path / "old", {"tekken.json": json.dumps(tekken_document()).encode()}))
    assert old.encode("[INST]the[/INST]").ids == [1, 3, SPECIAL + TOKENS.index(b"the"), 4]


def test_whether_bos_is_added_says_tokenizer_config(tmp_path: Path) -> None:
    files = {"tekken.json": json.dumps(tekken_document()).encode()}
    folder = _folder(tmp_path / "m", files, {"add_bos_token": False, "add_eos_token": True})
    assert _read(folder).encode("the").ids == [SPECIAL + TOKENS.index(b"the"), 2]


def _in(part: str, **changes: object) -> Callable[[], dict[str, object]]:
    def changed() -> dict[str, object]:
        document: dict[str, Any] = tekken_document()
        document[part].update(changes)
        return document

    return changed


def _with_token(place: int, /, **changes: object) -> Callable[[], dict[str, object]]:
    def changed() -> dict[str, object]:
        document: dict[str, Any] = tekken_document()
        document["vocab"][place].update(changes)
        return document

    return changed


def _with_special(rank: int, text: str) -> Callable[[], dict[str, object]]:
    return lambda: tekken_document(special_tokens=[{"rank": rank, "token_str": text}])


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (list, "holds list, expected a JSON object"),
        (lambda: tekken_document(config=None), "default_vocab_size"),
        (lambda: tekken_document(vocab=3), "vocab is 3, expected a list"),
        (lambda: tekken_document(vocab=[]), f"vocab has 0 tokens, expected at least {len(TOKENS)}"),
        (_in("config", pattern=5), "pattern is 5, expected a regular expression"),
        (_in("config", pattern="("), "pattern is no regular expression: Oniguruma error: end pattern"),
        (_in("config", default_vocab_size=VOCAB_SIZE + 1), f"default_vocab_size is {VOCAB_SIZE + 1}"),
        (_in("config", default_num_special_tokens=10**6), "default_num_special_tokens is 1000000"),
        (_in("config", version="v11"), "version 'v11' and lists no special_tokens"),
        (_with_special(1, "<unk>"), "special_tokens has 1 entr"),
        (_with_special(0, "\ud800"), "special_tokens has 1 entr"),
        (_in("config", pattern="\ud800"), "expected a regular expression"),
        (_with_special(0, "a"), "are both 'a', expected distinct"),
        (_with_token(3, rank=4), "token 3 of vocab is broken"),
        (_with_token(3, token_bytes="*"), "token 3 of vocab is broken"),
        (_with_token(3, token_bytes="BA=="), "has 1 tokens twice"),
        (_with_token(3, token_bytes=base64.b64encode(b"abc").decode()), "no token for the byte 0x03"),
        (_with_token(260, token_bytes=base64.b64encode(b"a" * 257).decode()), "token 260 has 257 bytes"),
        (_with_token(260, token_bytes=""), "token 260 has 0 bytes"),
    ],
)  # fmt: skip
def test_a_broken_tekken_is_refused_by_name(tmp_path: Path, make: Callable[[], object], found: str) -> None:
    message = _refusal(_folder(tmp_path / "m", {"tekken.json": json.dumps(make()).encode()}))
    assert found in message
    assert "tekken.json" in message


def test_tekken_that_is_no_json_is_refused(tmp_path: Path) -> None:
    assert "not valid JSON" in _refusal(_folder(tmp_path / "m", {"tekken.json": b"\xff" * 9}))
    assert "not valid JSON" in _refusal(_folder(tmp_path / "n", {"tekken.json": b"[" * 10**5}))


def test_of_several_vocabularies_the_usual_one_is_read_and_others_are_refused(tmp_path: Path) -> None:
    assert vocabulary_files(["tokenizer.json", "tekken.json", "tokenizer.model"]) == []
    assert vocabulary_files(["tekken.json", "tokenizer.model", "config.json"]) == ["tokenizer.model"]
    assert vocabulary_files(["tokenizer.model.v3", "a.json"]) == ["tokenizer.model.v3"]
    assert vocabulary_files(["mistral_instruct_tokenizer_241114.model.v7m1", "tokenizer.model.bak"]) == [
        "mistral_instruct_tokenizer_241114.model.v7m1"
    ]
    folder = _folder(tmp_path / "m", {"tekken.json": b"{}", "tokenizer.model.v3": b""})
    assert "has the vocabularies tekken.json, tokenizer.model.v3, expected one" in _refusal(folder)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Llama 3 have as many tokens as the vocabulary above, and special ones for which there is room."""
    monkeypatch.setattr(tiktoken_file, "_TOKENS", len(TOKENS))
    monkeypatch.setattr(tiktoken_file, "_SPECIAL", 30)


def _tiktoken(tokens: list[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))


@pytest.mark.usefixtures("small")
def test_a_tiktoken_file_gives_the_ids_of_its_definition(tmp_path: Path) -> None:
    tokenizer = _read(_folder(tmp_path / "m", {"tokenizer.model": _tiktoken(TOKENS)}))
    bos = len(TOKENS)
    for text in ("the weather", " the ther weathered\n\nllama 12345", *multilingual_texts(300)):
        expected = [bos, *ranked_ids(text, SPLITTING_RULES["llama-bpe"].patterns[0])]
        assert tokenizer.encode(text).ids == expected, text
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize("line", PUBLISHED, ids=lambda line: line["from"])
def test_special_tokens_of_a_tiktoken_file_are_metas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: dict[str, Any]
) -> None:
    monkeypatch.setattr(tiktoken_file, "_TOKENS", len(TOKENS))
    folder = _folder(tmp_path / "m", {"tokenizer.model": _tiktoken(TOKENS)})
    config = {"rope_scaling": {"rope_type": "llama3"}} if line["since_3_1"] else {}
    assets = tokenizer_from_folder(ModelFolder(folder), config, vocab_size=1024)
    tokenizer = Tokenizer.from_buffer(assets.tokenizer_json)
    assert [tokenizer.id_to_token(len(TOKENS) + place) for place in range(256)] == line["texts"]


def _added(first: int, *texts: str, **flags: bool) -> dict[str, object]:
    entries = {
        str(first + place): {"content": text, "special": True, **flags} for place, text in enumerate(texts)
    }
    return {"added_tokens_decoder": entries, "bos_token": texts[0]}


@pytest.mark.usefixtures("small")
def test_special_tokens_of_a_tiktoken_file_are_those_of_tokenizer_config(tmp_path: Path) -> None:
    added = _added(len(TOKENS), "<|begin_of_text|>", "<|mine|>")
    tokenizer = _read(_folder(tmp_path / "m", {"tokenizer.model": _tiktoken(TOKENS)}, added))
    assert tokenizer.encode("<|mine|>the").ids == [
        len(TOKENS), len(TOKENS) + 1, TOKENS.index(b"the")
    ]  # fmt: skip
    assert tokenizer.get_vocab_size() == len(TOKENS) + 2


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("data", "config", "found"),
    [
        (_tiktoken(TOKENS[:-1]), {}, f"a tiktoken file of {len(TOKENS) - 1} tokens, expected {len(TOKENS)}"),
        (_tiktoken(TOKENS).replace(b" 7\n", b" 8\n"), {}, "line 8 is broken"),
        (_tiktoken(TOKENS) + b"%% 5", {}, f"file of {len(TOKENS) + 1} tokens"),
        (_tiktoken(TOKENS).replace(b"BQ==", b"%Q=="), {}, "line 6 is broken"),
        (_tiktoken([*TOKENS[:-1], TOKENS[0]]), {}, "has 1 tokens twice"),
        (_tiktoken(TOKENS), _added(len(TOKENS) + 1, "<|begin_of_text|>"), "expected 269, the next free one"),
        (_tiktoken(TOKENS), _added(len(TOKENS), "<|begin_of_text|>", rstrip=True), "takes spaces around it"),
        (_tiktoken(TOKENS), _added(len(TOKENS), "<|nothing|>"), "asks for a bos token"),
    ],
)  # fmt: skip
def test_a_broken_tiktoken_file_is_refused_by_name(
    tmp_path: Path, data: bytes, config: dict[str, object], found: str
) -> None:
    message = _refusal(_folder(tmp_path / "m", {"tokenizer.model": data}, config))
    assert found in message
    assert "tokenizer.model" in message


@pytest.mark.usefixtures("small")
def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    data = _tiktoken(TOKENS).replace(b"\n", b"\r\n")
    assert _read(_folder(tmp_path / "m", {"tokenizer.model": data})).get_vocab_size() == len(TOKENS) + 30


def test_tokens_that_are_too_long_together_are_refused() -> None:
    tokens = [place.to_bytes(256, "little") for place in range(2**16 + 1)]
    with pytest.raises(ArtifactError, match="tokens of 16777472 bytes together, expected at most 16777216"):
        check_ranked(tokens, origin="x")


def test_all_ways_to_make_a_token_are_merges() -> None:
    assert merges_by_rank([b"a", b"b", b" ", b"ab", b"ba", b"aba"], origin="x") == [
        "a b",
        "b a",
        "a ba",
        "ab a",
    ]
