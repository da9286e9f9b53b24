"""Tokenizer, template, stop tokens and sampling defaults of Hugging Face folders."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from llorch_export.checkpoint.base import TokenizerAssets
from llorch_export.checkpoint.folder import ModelFolder
from llorch_export.source.open import open_checkpoint
from llorch_export.tokenizer import sentencepiece_model
from llorch_export.tokenizer.reading import tokenizer_from_folder
from llorch_serve.artifact.manifest import GenerationDefaults
from llorch_serve.errors import ArtifactError
from support.builders.checkpoints import (
    BOS_ID,
    CHAT_TEMPLATE,
    EOS_ID,
    VOCAB_SIZE,
    tiny_tokenizer_json,
    write_hf_folder,
)

TEXT = ("weather whether", "the weather is fine, the bandwidth is not", "tokens and more tokens and weights")


def _assets(folder: Path) -> TokenizerAssets:
    return open_checkpoint(str(folder)).tokenizer


def _refusal(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_checkpoint(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _sentencepiece_folder(path: Path, *, model_type: str = "bpe", **options: object) -> Path:
    """Write a folder whose only tokenizer is a SentencePiece model of 300 pieces."""
    folder = write_hf_folder(path, tokenizer=False)
    model = io.BytesIO()
    settings = {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "vocab_size": 300,
        **options,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT * 5), model_writer=model, model_type=model_type, minloglevel=2, **settings
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def test_tokenizer_json_is_taken_as_it_is(tmp_path: Path) -> None:
    assets = _assets(write_hf_folder(tmp_path / "m"))
    assert assets.tokenizer_json == tiny_tokenizer_json().encode()
    assert assets.bos_token_id == BOS_ID
    assert assets.eos_token_id == EOS_ID
    assert assets.stop_token_ids == (EOS_ID,)
    assert assets.chat_templates == {"default": CHAT_TEMPLATE}
    assert assets.generation == GenerationDefaults()


def test_stop_tokens_are_the_union_of_all_files(tmp_path: Path) -> None:
    folder = write_hf_folder(
        tmp_path / "m",
        {"eos_token_id": [9, 5]},
        generation_config={"eos_token_id": [4, 5]},
        tokenizer_config={"eos_token": {"content": "<|turn_end|>", "__type": "AddedToken"}},
    )
    assert _assets(folder).stop_token_ids == (3, 4, 5, 9)


def test_a_model_without_end_of_sequence_has_no_stop_tokens(tmp_path: Path) -> None:
    folder = write_hf_folder(
        tmp_path / "m",
        {"eos_token_id": None, "bos_token_id": None},
        generation_config={},
        tokenizer_config={"eos_token": None, "bos_token": None},
    )
    assert _assets(folder).stop_token_ids == ()
    assert _assets(folder).bos_token_id is None


def test_bos_falls_back_to_config_json(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", {"bos_token_id": 7}, tokenizer_config={"bos_token": None})
    assert _assets(folder).bos_token_id == 7


def test_a_template_file_wins_over_the_setting(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("from the file é", encoding="utf-8")
    assert _assets(folder).chat_templates == {"default": "from the file é"}


def test_of_several_templates_all_are_taken_and_files_come_first(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = write_hf_folder(tmp_path / "m", tokenizer_config={"chat_template": named})
    assert _assets(folder).chat_templates == {"tool_use": "tools", "default": "plain"}
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(f"file of {name}")
    expected = {"tool_use": "file of tool_use", "default": "plain", "rag": "file of rag"}
    assert _assets(folder).chat_templates == expected


def test_a_template_file_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (tmp_path / "secret").write_text("x")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(ArtifactError, match="leads out of its folder"):
        _assets(folder)


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_a_processors_template_counts_where_the_tokenizer_has_none(tmp_path: Path, name: str) -> None:
    folder = write_hf_folder(tmp_path / "m", tokenizer_config={"chat_template": None})
    (folder / name).write_text(json.dumps({"chat_template": "of the processor"}))
    assert _assets(folder).chat_templates == {"default": "of the processor"}
    (folder / "chat_template.jinja").write_text("of the tokenizer")
    assert _assets(folder).chat_templates == {"default": "of the tokenizer"}


def test_a_token_that_ends_turns_and_that_the_template_writes_stops(tmp_path: Path) -> None:
    inner = Tokenizer.from_str(tiny_tokenizer_json())
    inner.add_special_tokens(["<|im_end|>", "<|eot_id|>"])
    folder = write_hf_folder(
        tmp_path / "m", {"vocab_size": 520}, tokenizer_config={"chat_template": "a<|im_end|>"}
    )
    inner.save(str(folder / "tokenizer.json"))
    assert _assets(folder).stop_token_ids == (EOS_ID, inner.token_to_id("<|im_end|>"))


def test_tokens_beyond_the_embedding_are_counted_in_a_notice(tmp_path: Path) -> None:
    inner = Tokenizer.from_str(tiny_tokenizer_json())
    inner.add_special_tokens([f"<extra_{n}>" for n in range(88)])
    folder = write_hf_folder(tmp_path / "m")
    inner.save(str(folder / "tokenizer.json"))
    (notice,) = _assets(folder).notices
    assert "88 tokens of the tokenizer have ids of 512 and more" in notice


def test_an_added_token_with_another_id_than_in_tokenizer_json_is_refused(tmp_path: Path) -> None:
    decoder = {"9": {"content": "<|bos|>", "special": True}}
    message = _refusal(write_hf_folder(tmp_path / "m", tokenizer_config={"added_tokens_decoder": decoder}))
    assert "gives '<|bos|>' the id 9, expected 0" in message


def test_code_of_the_tokenizers_own_is_told_and_not_run(tmp_path: Path) -> None:
    code = {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}
    (notice,) = _assets(write_hf_folder(tmp_path / "m", tokenizer_config={"auto_map": code})).notices
    assert "is not run" in notice


def test_a_model_without_template_has_none(tmp_path: Path) -> None:
    folder = write_hf_folder(tmp_path / "m", tokenizer_config={"chat_template": None})
    assert _assets(folder).chat_templates == {}


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_p": 0.9,
                "top_k": 40,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
            },
            GenerationDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1),
        ),
        ({"temperature": 0.7, "top_k": None}, GenerationDefaults(temperature=0.7)),
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2},
            GenerationDefaults(temperature=0.0, repetition_penalty=1.2),
        ),
        ({"typical_p": 0.9, "top_p": 1.0}, GenerationDefaults(typical_p=0.9, top_p=1.0)),
        ({"do_sample": False, "typical_p": 0.9}, GenerationDefaults(temperature=0.0)),
        ({"max_new_tokens": 5, "_from_model_config": True}, GenerationDefaults()),
    ],
)
def test_recommended_sampling_values_follow_do_sample(
    tmp_path: Path, generation_config: dict[str, object], expected: GenerationDefaults
) -> None:
    assert (
        _assets(write_hf_folder(tmp_path / "m", generation_config=generation_config)).generation == expected
    )


@pytest.mark.parametrize(
    ("generation_config", "found"),
    [
        ({"eos_token_id": VOCAB_SIZE}, "eos_token_id is 512, expected ids from 0 to 511"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id is [1, -1]"),
        ({"eos_token_id": "1"}, "eos_token_id is '1'"),
        ({"temperature": -1}, "temperature is -1, expected a number from 0 to 2"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0, expected a number above 0 to 1"),
        ({"typical_p": 0}, "typical_p is 0, expected a number above 0 to 1"),
        ({"top_k": 1.5}, "top_k is 1.5, expected an integer"),
        ({"do_sample": "no"}, "do_sample is 'no'"),
    ],
)
def test_impossible_generation_settings_are_named(
    tmp_path: Path, generation_config: dict[str, object], found: str
) -> None:
    message = _refusal(write_hf_folder(tmp_path / "m", generation_config=generation_config))
    assert found in message
    assert "generation_config.json" in message


@pytest.mark.parametrize(
    ("tokenizer_config", "found"),
    [
        ({"eos_token": "<absent>"}, "eos_token is '<absent>', expected a token of tokenizer.json"),
        ({"bos_token": 5}, "bos_token is 5"),
        (
            {"chat_template": [{"name": "a/b", "template": "x"}, {"name": "default", "template": "x"}]},
            "expected letters, digits, - and _",
        ),
        (
            {"chat_template": [{"name": str(n), "template": "x"} for n in range(17)]},
            "expected one named 'default'",
        ),
        (
            {"chat_template": [{"name": n, "template": "x"} for n in ["default", *"abcdefghijklmnop"]]},
            "expected at most 16",
        ),
        (
            {"chat_template": [{"name": "rag", "template": "x"}]},
            "templates ['rag'], expected one named 'default'",
        ),
        ({"chat_template": 5}, "chat_template is int, expected text"),
        ({"chat_template": "x" * (2**20 + 1)}, "expected text of at most 1048576 characters"),
    ],
)
def test_impossible_tokenizer_settings_are_named(
    tmp_path: Path, tokenizer_config: dict[str, object], found: str
) -> None:
    message = _refusal(write_hf_folder(tmp_path / "m", tokenizer_config=tokenizer_config))
    assert found in message
    assert "tokenizer_config.json" in message


def test_a_missing_tokenizer_says_how_to_make_one(tmp_path: Path) -> None:
    message = _refusal(write_hf_folder(tmp_path / "m", tokenizer=False))
    assert "neither tokenizer.json nor tokenizer.model" in message
    assert "AutoTokenizer.from_pretrained" in message


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": {"type": "Nonsense"}}'])
def test_a_broken_tokenizer_json_is_named(tmp_path: Path, content: bytes) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json is not a usable tokenizer" in _refusal(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, '"text"'])
def test_broken_settings_are_named(tmp_path: Path, name: str, content: str) -> None:
    folder = write_hf_folder(tmp_path / "m")
    (folder / name).write_text(content)
    assert name in _refusal(folder)


@pytest.mark.parametrize(
    ("settings", "starts", "ends"),
    [({}, [1], []), ({"add_bos_token": False, "add_eos_token": True}, [], [2])],
)
def test_a_sentencepiece_model_alone_is_converted(
    tmp_path: Path, settings: dict[str, object], starts: list[int], ends: list[int]
) -> None:
    folder = _sentencepiece_folder(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **settings}))
    assets = _assets(folder)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = Tokenizer.from_buffer(assets.tokenizer_json).encode("the weather é").ids
    assert ids == [*starts, *reference.encode("the weather é"), *ends]
    assert assets.stop_token_ids == (1, 2)  # config.json says 1, the tokenizer 2


def test_tokens_added_to_a_sentencepiece_model_keep_their_ids(tmp_path: Path) -> None:
    folder = _sentencepiece_folder(tmp_path / "m")
    (folder / "added_tokens.json").write_text('{"<pad>": 300}')
    decoder = {"2": {"content": "</s>", "special": True}, "301": {"content": "<end>", "special": True}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder, "eos_token": "<end>"})
    )
    assets = _assets(folder)
    tokenizer = Tokenizer.from_buffer(assets.tokenizer_json)
    assert tokenizer.token_to_id("<pad>") == 300
    assert tokenizer.encode("a<end>", add_special_tokens=False).ids[-1] == 301
    assert assets.stop_token_ids == (1, 301)
    (folder / "added_tokens.json").write_text('{"<pad>": 305}')
    assert "'<end>' has id 301, expected 300" in _refusal(folder)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"model_type": "unigram", "vocab_size": 280}, "model type unigram"),
        ({"normalization_rule_name": "nmt_nfkc"}, "a normalisation table"),
        ({"remove_extra_whitespaces": True}, "removal of extra whitespace"),
        ({"treat_whitespace_as_suffix": True}, "whitespace as suffix"),
    ],
)
def test_other_sentencepiece_models_are_refused_with_the_way_out(
    tmp_path: Path, options: dict[str, object], found: str
) -> None:
    message = _refusal(_sentencepiece_folder(tmp_path / "m", **options))  # type: ignore[arg-type]
    assert found in message
    assert "AutoTokenizer.from_pretrained" in message


@pytest.mark.parametrize("content", [b"", b"\x0a\xff\xff\xff\xff\x0f", b"text"])
def test_a_broken_sentencepiece_model_is_named(tmp_path: Path, content: bytes) -> None:
    folder = write_hf_folder(tmp_path / "m", tokenizer=False)
    (folder / "tokenizer.model").write_bytes(content)
    assert "tokenizer.model" in _refusal(folder)


def _damaged(folder: Path, change: Callable[[Any], None]) -> Path:
    file = folder / "tokenizer.model"
    model = sentencepiece_model._model_class().FromString(file.read_bytes())
    change(model)
    file.write_bytes(model.SerializeToString())
    return folder


def _set(path: str, value: object) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        *parts, last = path.split(".")
        target = model.pieces[280] if parts == ["piece"] else getattr(model, parts[0])
        setattr(target, last, value)

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_set("piece.score", math.nan), "score of token 280 is nan"),
        (_set("piece.score", -math.inf), "score of token 280 is -inf"),
        (_set("piece.piece", b"a" * 257), "257 characters"),
        (_set("piece.piece", b"e"), "both 'e'"),
        (_set("trainer_spec.unk_id", 300), "unk_id is 300"),
        (_set("trainer_spec.eos_id", -2), "eos_id is -2"),
    ],
)
def test_a_sentencepiece_model_with_a_bad_field_is_refused(
    tmp_path: Path, change: Callable[[Any], None], found: str
) -> None:
    assert found in _refusal(_damaged(_sentencepiece_folder(tmp_path / "m"), change))


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (b"\x0a\x05<unk>", b"\x0a\x05<un\xff>", "piece 0 is b'<un\\xff>', expected UTF-8"),
        (b"\x18\x02", b"\x18\x09", "piece 0 is of type 9"),
    ],
)
def test_a_sentencepiece_model_with_damaged_bytes_is_refused(
    tmp_path: Path, old: bytes, new: bytes, found: str
) -> None:
    folder = _sentencepiece_folder(tmp_path / "m")
    file = folder / "tokenizer.model"
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new, 1))
    assert found in _refusal(folder)


@pytest.fixture(scope="module")
def changing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _sentencepiece_folder(tmp_path_factory.mktemp("changing") / "m")


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
_KEYS = (
    *("bos_token", "eos_token", "pad_token", "image_token", "extra_special_tokens"),
    *("add_bos_token", "legacy", "chat_template", "added_tokens_decoder", "tokenizer_class", "auto_map"),
)


@settings(max_examples=150, deadline=None)
@given(
    value=_VALUES,
    key=st.sampled_from(_KEYS),
    file=st.sampled_from(["tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"]),
)
@example(value="\ud800", key="eos_token", file="tokenizer_config.json")
@example(value={"9" * 5000: {"content": "x"}}, key="added_tokens_decoder", file="tokenizer_config.json")
@example(value={"300": {"content": "\ud800"}}, key="added_tokens_decoder", file="tokenizer_config.json")
@example(value=300, key="\ud800", file="added_tokens.json")
@example(value=300, key="", file="added_tokens.json")
def test_any_value_of_any_field_is_taken_or_refused(
    changing_folder: Path, value: object, key: str, file: str
) -> None:
    for name in ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"):
        (changing_folder / name).write_text(json.dumps({key: value} if name == file else {}))
    with contextlib.suppress(ArtifactError):
        tokenizer_from_folder(ModelFolder(changing_folder), {}, vocab_size=VOCAB_SIZE)
