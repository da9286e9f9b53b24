"""Tiny models with published config.json and tokenizer_config.json are exported as transformers has them:
the same logits, the same token ids, and accepted by ``verify``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llorch_export.config.hf import read_config
from llorch_export.verify.divergence import verify
from llorch_serve.artifact.folder import Artifact
from llorch_serve.bench.workload import sample_text
from llorch_serve.errors import ArtifactError
from llorch_serve.requests import ChatMessage, ChatPrompt, TextPrompt
from llorch_serve.text.tokenizer import Tokenizer
from llorch_serve.worker.prompts import PromptEncoder
from support.builders.checkpoints import tiny_config, write_hf_folder
from support.builders.published_tokenizers import kind_of, settings_for, write_tokenizer
from support.builders.shrunk_configs import shrunk
from support.builders.tiny_exports import export_tiny, open_tiny, random_ids, silent
from support.oracles.stepwise import reference
from tolerances import FP32_LOGITS

PUBLISHED = Path(__file__).parent.parent / "data" / "published" / "configs.jsonl"
TOKENS = 96
TEXTS = (
    *("hello world", " the end", "", " ", "  two  spaces", "line\n\nbreaks\r\n\t tab", "In 2024: 1234567"),
    *("it's I'LL we've", "f(x) = [1, 2]; // end", "cafe\u0301 na\u00efve", "\u4f60\u597d\uff0c\u4e16\u754c"),
    *(
        "\u0939\u093f\u0928\u094d\u0926\u0940",
        "\U0001f642\U0001f680",
        "\u0645\u0631\u062d\u0628\u0627",
        "camelCase HTTPServer",
    ),
    *("\u00a0x\u3000y", "---- ....", "user system assistant", "a", "the\u200dworld \ufb01"),
)
CHAT = [{"role": "user", "content": "hello the world"}]
# One of each kind at every run: the rest takes minutes.
USUAL = (
    "HuggingFaceTB__SmolLM3-3B",
    "Qwen__Qwen2.5-0.5B",
    "ibm-granite__granite-3.3-8b-instruct",
    "meta-llama__Llama-3.2-3B-Instruct",
    "microsoft__Phi-4-mini-instruct",
    "mistralai__Mistral-7B-v0.1",
)


def _distinct() -> dict[str, dict[str, Any]]:
    """Return the accepted configs, shrunk, but of those that become the same only the first."""
    found: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    rows = [json.loads(line) for line in PUBLISHED.read_text(encoding="utf-8").splitlines()]
    for row in sorted(rows, key=lambda row: row["name"] not in USUAL):
        small = shrunk(row["config"])
        small.pop("quantization_config", None)
        try:
            key = repr((read_config(small).config, sorted(small)))
        except ArtifactError:
            continue
        if key not in seen:
            seen.add(key)
            found[row["name"]] = small
    return found


CONFIGS = _distinct()


def _published() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the kind of tokenizer and the tokenizer_config.json that go with each config."""
    rows = map(json.loads, PUBLISHED.read_text(encoding="utf-8").splitlines())
    kinds = {row["name"]: kind_of(row["config"]) for row in rows if row["name"] in CONFIGS}
    return {
        name: (kind, settings_for(name, kind, turn))
        for turn, (name, kind) in enumerate(sorted(kinds.items()))
    }


TOKENIZERS = _published()


def _check_ids(artifact: Artifact, folder: Path, settings: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    encoder = PromptEncoder(artifact, Tokenizer.load(artifact.tokenizer_path))
    for text in TEXTS:
        if expected := reference(text).input_ids:  # an empty prompt is refused
            assert list(encoder.encode(TextPrompt(text), context=128)[0]) == expected, repr(text)
    if settings.get("chat_template"):
        rendered = reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        prompt = ChatPrompt((ChatMessage(role="user", content=CHAT[0]["content"]),))
        expected = reference(rendered, add_special_tokens=False).input_ids
        start = reference("a").input_ids[0]
        if start == reference.bos_token_id != expected[0]:
            expected = [start, *expected]  # transformers leaves it out where the template does: docs/chat.md
        assert list(encoder.encode(prompt, context=4096)[0]) == expected, rendered


@pytest.mark.reference
@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
def test_a_tiny_model_with_published_settings_computes_what_transformers_computes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llorch_export.verify.sample_tokens.sample_text", lambda: sample_text()[:400])
    data = CONFIGS[name]
    as_overrides = {**dict.fromkeys(tiny_config()), **data}
    folder = write_hf_folder(tmp_path / "model", as_overrides)
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")  # with its nulls
    kind, published = TOKENIZERS[name]
    settings = write_tokenizer(folder, kind, published)
    artifact = export_tiny(folder, tmp_path / "artifact", max_context=128)
    _check_ids(artifact, folder, settings)
    if name not in USUAL[2:]:  # it loads both models once more
        assert verify(artifact.folder, str(folder), silent).passed
    ids = random_ids(TOKENS)
    session = open_tiny(artifact)
    found = session.prefill(0, ids, 0, range(TOKENS))
    np.testing.assert_allclose(found, reference(folder, ids), atol=FP32_LOGITS, rtol=0)


def test_there_are_enough_published_settings() -> None:
    assert len(CONFIGS) >= 60
    assert set(USUAL) <= set(CONFIGS)
