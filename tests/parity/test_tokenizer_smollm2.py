"""The tokenizer rebuilt from SmolLM2's GGUF file gives the ids of transformers."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from llorch_export.checkpoint.base import TokenizerAssets
from llorch_export.source.open import open_checkpoint

pytestmark = [pytest.mark.real_model, pytest.mark.reference]

TEXTS = (
    "",
    "What is the capital of France?",
    "  a   b\n\n\tc  \r\n",
    "1234567 3.14159 2024-01-31 x86_64 ½ Ⅷ ٣",
    "I've WE'LL he's 'tis",
    "🙂🚀👩‍👩‍👧 日本語のテキスト 한국어 Привет naïve",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <file_sep>  x<|im_end",
    "\u00a0x\u3000y \ufb01 \x00\x7f e\u0301",
    "def f(x):\n    return {x: [1, 2]}\n",
)
FRAGMENTS = [
    *map(chr, range(32, 127)),
    *"\t\n\r\u00a0é中🙂\u200d٣Ⅷ½",
    "<|im_end|>",
    "'re",
    "   ",
    "\n\n",
    "2024",
    "the ",
]


@pytest.fixture(scope="module")
def assets(smollm2_gguf: Path) -> TokenizerAssets:
    return open_checkpoint(str(smollm2_gguf)).tokenizer


@pytest.fixture(scope="module")
def rebuilt(assets: TokenizerAssets) -> Tokenizer:
    return Tokenizer.from_buffer(assets.tokenizer_json)


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_gguf.parent), gguf_file=smollm2_gguf.name)


def _texts() -> list[str]:
    rng = random.Random(11)
    return [*TEXTS, *("".join(rng.choices(FRAGMENTS, k=rng.randint(1, 60))) for _ in range(1000))]


def test_text_without_digits_has_the_ids_of_transformers(rebuilt: Tokenizer, reference: Any) -> None:
    texts = [
        text for text in _texts() if not any(unicodedata.category(character)[0] == "N" for character in text)
    ]
    assert len(texts) > 100
    for text in texts:
        ids = reference(text)["input_ids"]
        assert rebuilt.encode(text).ids == ids, text
        assert rebuilt.decode(ids, skip_special_tokens=False) == reference.decode(
            ids, skip_special_tokens=False
        )


def test_text_with_digits_has_the_ids_of_the_model_s_own_rules(rebuilt: Tokenizer, reference: Any) -> None:
    # transformers ignores tokenizer.ggml.pre. The model was trained with digits cut apart first.
    backend = Tokenizer.from_str(reference.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in _texts():
        assert rebuilt.encode(text).ids == backend.encode(text).ids, text


def test_special_tokens_and_template_are_those_of_transformers(
    assets: TokenizerAssets, rebuilt: Tokenizer, reference: Any
) -> None:
    assert reference.eos_token_id == 2
    assert assets.stop_token_ids == (0, 2, 4)  # <|endoftext|>, <|im_end|>, <reponame>: as llama.cpp has them
    assert assets.bos_token_id == reference.bos_token_id == 1
    assert assets.chat_templates == {"default": reference.chat_template}
    assert {token.content for token in rebuilt.get_added_tokens_decoder().values() if token.special} >= set(
        reference.all_special_tokens
    )
