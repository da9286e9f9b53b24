"""tokenizer_config.json is read as transformers' AutoTokenizer reads it: ids, tokens by role, templates."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from llorch_export.checkpoint.base import TokenizerAssets
from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.tokenizer.bpe import sentencepiece_bpe
from llorch_export.tokenizer.reading import tokenizer_from_folder
from llorch_export.tokenizer.vocabulary import TokenKind, Vocabulary
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import VOCAB_SIZE, tiny_tokenizer_json

transformers = pytest.importorskip("transformers")

PUBLISHED = Path(__file__).parents[1] / "data" / "published"
SENTENCEPIECE = (None, "LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast")
TEXTS = ("Hello <s>.", " ab", "ab<s> ab</s>ab", "a", "", " ", "  ab\n", "<unk>é")


def _sentencepiece_json(*, bos: bool = True, eos: bool = False) -> str:
    """Return the tokenizer.json of a small SentencePiece vocabulary, with rules as Llama 2 ships them."""
    pieces = ["▁", "a", "b", "ab", "▁ab", "H", "e", "l", "o", "."]
    kinds = [TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.CONTROL]
    built = sentencepiece_bpe(
        Vocabulary(
            tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
            kinds=[*kinds, *[TokenKind.BYTE] * 256, *[TokenKind.NORMAL] * len(pieces)],
            bos=1,
            eos=2,
            unknown=0,
            add_bos=bos,
            add_eos=eos,
            scores=[0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -3.0, *[-9.0] * 5],
            space_prefix=True,
        )
    )
    return built.to_str()


def _folder(
    path: Path, content: str, settings: dict[str, Any], model_type: str = "llama", **files: Any
) -> Path:
    path.mkdir()
    for name, value in {"config": {"model_type": model_type}, "tokenizer_config": settings, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    (path / "tokenizer.json").write_text(content)
    return path


def _ours(folder: Path) -> TokenizerAssets:
    config = json.loads((folder / "config.json").read_text())
    return tokenizer_from_folder(ModelFolder(folder), config, vocab_size=VOCAB_SIZE)


def _reference(folder: Path) -> Any:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return transformers.AutoTokenizer.from_pretrained(folder)


def _check_ids(folder: Path, texts: tuple[str, ...] = TEXTS) -> None:
    tokenizer = Tokenizer.from_buffer(_ours(folder).tokenizer_json)
    reference = _reference(folder)
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert ids == reference(text).input_ids, repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(
            ids, skip_special_tokens=True
        )


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"legacy": True},
        {"legacy": False},
        {"legacy": None},
        {"add_prefix_space": False},
        {"add_prefix_space": True, "legacy": True},
        {"add_prefix_space": None, "legacy": False},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": None, "add_eos_token": None},
    ],
)
def test_ids_follow_legacy_and_prefix_space_as_in_transformers(
    tmp_path: Path, name: str, flags: dict[str, Any]
) -> None:
    settings = {
        "tokenizer_class": name,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        **flags,
    }
    _check_ids(_folder(tmp_path / "m", _sentencepiece_json(), settings))


@pytest.mark.parametrize("model_type", ["mistral", "phi3", "qwen3"])
def test_families_that_take_a_file_as_it_is_do_so(tmp_path: Path, model_type: str) -> None:
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    _check_ids(_folder(tmp_path / "m", _sentencepiece_json(), settings, model_type))


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_byte_level_files_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    _check_ids(_folder(tmp_path / "m", tiny_tokenizer_json(), {"tokenizer_class": name, "legacy": True}))


@pytest.mark.parametrize("adds", [True, False])
def test_what_tokenizer_json_adds_counts_and_a_contradiction_is_told(tmp_path: Path, adds: bool) -> None:
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": not adds, "bos_token": "<s>"}
    folder = _folder(tmp_path / "m", _sentencepiece_json(bos=adds), settings)
    if not adds:
        plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
        plain.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
        plain.save(str(folder / "tokenizer.json"))
    _check_ids(folder)
    (notice,) = _ours(folder).notices
    assert f"add_bos_token of tokenizer_config.json is {str(not adds).lower()}" in notice


MENTIONS_ALL = "".join(
    f"{role}={{% if {role} is defined %}}{{{{ {role} }}}}{{% else %}}none{{% endif %}};"
    for role in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "image_token")
)


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({}, {}),
        ({"pad_token": "<unk>"}, {}),
        ({"pad_token": None, "unk_token": None, "bos_token": None}, {}),
        ({"eos_token": ""}, {}),
        ({"pad_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False}}, {}),
        ({"image_token": "<unk>"}, {}),
        ({"extra_special_tokens": {"image_token": "<s>"}}, {}),
        ({}, {"special_tokens_map": {"pad_token": "</s>", "unk_token": {"content": "<s>"}}}),
        (
            {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}}},
            {"special_tokens_map": {"pad_token": "<s>"}},
        ),
    ],
)
@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_templates_see_the_tokens_that_transformers_gives_them(
    tmp_path: Path, name: str, settings: dict[str, Any], files: dict[str, Any]
) -> None:
    folder = _folder(
        tmp_path / "m",
        _sentencepiece_json(),
        {"tokenizer_class": name, "chat_template": MENTIONS_ALL, **settings},
        **files,
    )
    assert _rendered(_ours(folder)) == _reference(folder).apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False
    )


def _rendered(assets: TokenizerAssets) -> str:
    from llorch_serve.chat.template import ChatTemplate
    from llorch_serve.chat.template_input import read_input
    from llorch_serve.requests import ChatMessage, ChatPrompt

    tokens = assets.template_tokens
    if tokens is None:
        known = Tokenizer.from_buffer(assets.tokenizer_json)
        ids = {"bos_token": assets.bos_token_id, "eos_token": assets.eos_token_id}
        tokens = {role: str(known.id_to_token(id_)) for role, id_ in ids.items() if id_ is not None}
    template = ChatTemplate(
        assets.chat_templates["default"],
        tokens.get("bos_token"),
        tokens.get("eos_token"),
        other_tokens=tokens,
    )
    return template.render(read_input(ChatPrompt((ChatMessage(role="user", content="x"),))))


def _published(kind: str) -> list[Any]:
    lines = (PUBLISHED / f"{kind}.jsonl").read_text().splitlines()
    return [pytest.param(entry["file"], id=entry["name"]) for entry in map(json.loads, lines)]


@pytest.mark.parametrize("settings", _published("tokenizers"))
def test_published_settings_are_read_as_transformers_reads_them(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Their vocabularies are large, so each gets a small one that has its special tokens at their ids."""
    named = {key: settings[key] for key in settings if key.endswith("_token") and settings[key]}
    values = [value["content"] if isinstance(value, dict) else value for value in named.values()]
    texts = [value for value in values if isinstance(value, str)]
    content = _with_tokens(settings.get("added_tokens_decoder", {}), texts)
    families = {"Qwen2Tokenizer": "qwen3", "GPTNeoXTokenizer": "stablelm"}
    model_type = families.get(settings.get("tokenizer_class", ""), "llama")
    folder = _folder(
        tmp_path / "m", content, {**settings, "chat_template": MENTIONS_ALL}, model_type=model_type
    )
    config = {"model_type": model_type}
    ours = tokenizer_from_folder(ModelFolder(folder), config, vocab_size=2**20)
    if "AutoTokenizer" in settings.get("auto_map", {}):
        return  # transformers would ask to run the repository's code, and is no oracle
    reference = _reference(folder)
    assert _rendered(ours) == reference.apply_chat_template(
        [{"role": "user", "content": "x"}], tokenize=False
    )
    if reference.eos_token:
        assert reference.eos_token_id in ours.stop_token_ids
    if settings.get("tokenizer_class") in SENTENCEPIECE:  # others cut text by their classes' own rules
        tokenizer = Tokenizer.from_buffer(ours.tokenizer_json)
        for text in ("ab", " ab", "ab<s>ab", *texts[:4]):
            assert tokenizer.encode(text).ids == reference(text).input_ids, repr(text)


@pytest.mark.parametrize("data", _published("generation"))
def test_published_generation_settings_give_the_stop_tokens_of_transformers(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    folder = _folder(tmp_path / "m", _sentencepiece_json(), {}, generation_config=data)
    assets = tokenizer_from_folder(ModelFolder(folder), {}, vocab_size=2**20)
    reference = transformers.GenerationConfig.from_pretrained(folder)
    ends = reference.eos_token_id
    assert set(assets.stop_token_ids) == set(
        ends if isinstance(ends, list) else [] if ends is None else [ends]
    )
    if data.get("do_sample") and data.get("temperature") is not None:
        assert assets.generation.temperature == reference.temperature


def _with_tokens(decoder: dict[str, Any], texts: list[str]) -> str:
    """Return a small tokenizer.json that has the tokens of a decoder at their ids, and others behind them."""
    inner = json.loads(_sentencepiece_json())
    vocab = inner["model"]["vocab"]
    placed = {int(key): entry for key, entry in decoder.items()}
    taken = {token: id_ for token, id_ in vocab.items() if id_ not in placed}
    for id_, entry in placed.items():
        taken.pop(entry["content"], None)
        taken[entry["content"]] = id_
    lost = [token for token in vocab if token not in taken]
    free = max(taken.values(), default=0) + 1
    for token in [*lost, *(text for text in texts if text and text not in taken)]:
        if token not in taken:
            taken[token], free = free, free + 1
    inner["model"]["vocab"] = taken
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    inner["added_tokens"] = [
        {"id": id_, "content": entry["content"], **{flag: entry.get(flag, False) for flag in flags}}
        for id_, entry in sorted(placed.items())
    ]
    bos = inner["post_processor"]["special_tokens"]["<s>"]
    bos["ids"] = [taken["<s>"]]
    return json.dumps(inner)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    "role",
    [
        "<e>",
        {"__type": "AddedToken", "content": "<e>", "lstrip": True},
        {"__type": "AddedToken", "content": "<e>", "rstrip": True, "normalized": True, "special": False},
        {"__type": "AddedToken", "content": "</s>", "single_word": True, "lstrip": True},
    ],
)
def test_a_role_with_a_text_that_the_vocabulary_lacks_gets_the_next_id_as_in_transformers(
    tmp_path: Path, name: str, role: Any
) -> None:
    settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": role, "pad_token": "<p>"}
    folder = _folder(tmp_path / "m", _sentencepiece_json(), settings)
    _check_ids(folder, ("a <e> b", "ab<e>ab", "<p> a<e>", "a<e> <p>b", "a </s> b"))
    assert _ours(folder).stop_token_ids == (_reference(folder).eos_token_id,)


EXTRA = {"__type": "AddedToken", "content": "<x>", "lstrip": True, "rstrip": True}
BEFORE_5 = "additional_special_tokens"
NEXT_ID = 269


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({}, {"special_tokens_map": {"additional_special_tokens": ["<x>", "<y>"]}}),
        ({}, {"special_tokens_map": {"extra_special_tokens": ["<x>"]}}),
        (
            {BEFORE_5: ["<y>"]},
            {"special_tokens_map": {BEFORE_5: ["<x>"]}},
        ),
        ({BEFORE_5: []}, {"special_tokens_map": {BEFORE_5: ["<x>"]}}),
        ({BEFORE_5: ["<y>"], "extra_special_tokens": {"image_token": "<x>"}}, {}),
        ({BEFORE_5: ["<y>"], "extra_special_tokens": ["<x>"]}, {}),
        ({"additional_special_tokens": [EXTRA]}, {}),
        ({"extra_special_tokens": {"image_token": "<x>"}, "pad_token": "<y>"}, {}),
        ({"extra_special_tokens": {"image_token": "<x>"}}, {"special_tokens_map": {"pad_token": "<y>"}}),
        ({"pad_token": EXTRA}, {"special_tokens_map": {"pad_token": "<x>"}}),
        ({}, {"special_tokens_map": {"pad_token": {"content": "<x>", "rstrip": True}}}),
        ({}, {"added_tokens": {"<x>": NEXT_ID, "<y>": NEXT_ID + 1}}),
        ({"pad_token": "<x>"}, {"added_tokens": {"<x>": NEXT_ID}}),
        (
            {},
            {"added_tokens": {"<x>": NEXT_ID}, "special_tokens_map": {BEFORE_5: ["<x>"]}},
        ),
        ({"added_tokens_decoder": {}}, {"added_tokens": {"<x>": NEXT_ID}}),
    ],
)
def test_tokens_that_further_files_add_are_those_of_transformers(
    tmp_path: Path, name: str, settings: dict[str, Any], files: dict[str, Any]
) -> None:
    settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", **settings}
    folder = _folder(tmp_path / "m", _sentencepiece_json(), settings, **files)
    _check_ids(folder, ("a <x> b", "ab<y>ab", " <x>  <y>", "a<x>a </s>"))


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_role_leaves_the_flags_of_its_token_as_tokenizer_json_has_them(tmp_path: Path, name: str) -> None:
    inner = json.loads(_sentencepiece_json())
    for token in inner["added_tokens"]:
        token |= {"rstrip": True, "lstrip": token["content"] == "</s>"}
    settings = {"tokenizer_class": name, "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    folder = _folder(tmp_path / "m", json.dumps(inner), settings)
    _check_ids(folder, ("a <s> b", "a </s>  b", "ab <unk> ab"))


@pytest.mark.parametrize(
    ("settings", "files", "found"),
    [
        ({"additional_special_tokens": "<x>"}, {}, "extra_special_tokens is '<x>', expected a list"),
        ({"extra_special_tokens": [5]}, {}, "extra_special_tokens holds 5"),
        ({}, {"added_tokens": {"<x>": "5"}}, "added_tokens.json beside it gives '<x>' the id '5'"),
        ({}, {"added_tokens": {"<x>": 999}}, "added_tokens.json gives '<x>' the id 999, expected 269"),
    ],
)
def test_further_tokens_that_are_none_are_refused(
    tmp_path: Path, settings: dict[str, Any], files: dict[str, Any], found: str
) -> None:
    folder = _folder(tmp_path / "m", _sentencepiece_json(), settings, **files)
    with pytest.raises(ArtifactError, match=re.escape(found)):
        _ours(folder)


def test_special_tokens_are_never_split_and_a_setting_that_asks_for_it_is_told(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", _sentencepiece_json(), {"split_special_tokens": True})
    (notice,) = _ours(folder).notices
    assert notice.startswith("split_special_tokens")


def test_a_role_without_a_row_of_the_embedding_is_refused_and_padding_is_told(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"tokenizer_class": "LlamaTokenizer", "pad_token": "<p>"}
    rows = 269
    folder = ModelFolder(_folder(tmp_path / "pad", _sentencepiece_json(), settings))
    (notice,) = tokenizer_from_folder(folder, {}, vocab_size=rows).notices
    assert notice.startswith("1 tokens of the tokenizer have ids of 269 and more")
    folder = ModelFolder(_folder(tmp_path / "eos", _sentencepiece_json(), settings | {"eos_token": "<e>"}))
    with pytest.raises(ArtifactError, match=r"eos_token is '<e>', expected .* an id below 269"):
        tokenizer_from_folder(folder, {}, vocab_size=rows)
