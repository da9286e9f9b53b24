"""The random model of ``ci/bench-1b``, and its section of the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench_peers import models, random_llama
from bench_peers.contestant import Closeness, Work
from bench_peers.models import PeersFolder
from bench_peers.protocol import Measurement
from bench_peers.results import Machine
from bench_peers.shape import Found, section
from bench_peers.turns import Match
from llorch_export.source.open import open_checkpoint
from support.builders.checkpoints import write_gguf

TINY = random_llama.Shape(
    "tiny",
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocabulary=600,
    context=128,
)


@pytest.fixture
def quantised(monkeypatch, tmp_path: Path):
    """The calls of llama.cpp's quantiser, which is not here: it copies."""
    calls = []

    def quantise(_python, _script, verb, source, target, kind, *, python_path):
        assert python_path == ()  # nothing of ours
        calls.append((verb, kind))
        Path(target).write_bytes(Path(source).read_bytes())

    monkeypatch.setattr(models, "run_process", quantise)
    return calls


def test_the_random_model_is_a_checkpoint_with_every_tensor_and_a_full_vocabulary(quantised, tmp_path: Path):
    vocabulary = write_gguf(tmp_path / "vocabulary.gguf")
    peers = PeersFolder(tmp_path)
    files = random_llama.make(TINY, ("Q8_0", "Q4_0"), vocabulary, tmp_path / "out", peers)
    assert quantised == [("quantize", "Q8_0"), ("quantize", "Q4_0")]
    assert set(files) == {"F16", "Q8_0", "Q4_0"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in files.values()
    )
    checkpoint = open_checkpoint(str(files["Q8_0"]))
    config = checkpoint.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, 600)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.tie_word_embeddings
    random_llama.make(TINY, ("Q8_0", "Q4_0"), vocabulary, tmp_path / "out", peers)
    assert len(quantised) == 2, "what is there is not made again"


def test_a_random_model_of_experts_is_read_as_one(quantised, tmp_path: Path):
    shape = replace(TINY, experts=4, active=2)
    files = random_llama.make(
        shape, (), write_gguf(tmp_path / "vocabulary.gguf"), tmp_path, PeersFolder(tmp_path)
    )
    experts = open_checkpoint(str(files["F16"])).config.experts
    assert (experts.count, experts.per_token, experts.intermediate_size) == (4, 2, 96)


def test_the_section_compares_each_type_with_llama_cpp_and_says_what_holds():
    def speed(prefill, decode):
        one = {
            "engine": "e",
            "version": "1",
            "weights": "w",
            "streams": 1,
            "prompt_tokens": 8,
            "new_tokens": 4,
        }
        return [
            Measurement(**one, prefill_tokens_per_s=prefill * f, decode_tokens_per_s=decode * f, peak_mib=9.0)
            for f in (1, 0.5, 2)
        ]

    found = {
        "llorch, cpu": speed(200, 26),
        "llorch, Q8_0": speed(90, 24),
        "llama.cpp, Q8_0": speed(100, 20),
        "llorch, Q4_0": speed(90, 21),
        "llama.cpp, Q4_0": speed(45, 20),
    }
    close = {label: Found(Closeness(0.001, 0.99), Closeness(0.0002, 1)) for label in found}
    close["llorch, cpu"] = Found(Closeness(0.004, 0.9), None)
    work = Work(tuple(np.arange(8).tolist()), Path("x"), 4, (1,), 1, 2)
    matches = [
        Match("cpu to Q8_0", "llorch, cpu", "llama.cpp, Q8_0", 1.1),
        Match("Q8_0, the same", "llorch, Q8_0", "llama.cpp, Q8_0", 1.1),
        Match("Q4_0, the same", "llorch, Q4_0", "llama.cpp, Q4_0", 1.1),
    ]
    text = section(Machine("A CPU", 2, [], 16, "Linux", 0.1), work, matches, close, found)
    assert "| llorch, Q8_0 | 0.001 | 99.0% | 0.0002 | 90.0 | 24.0 | 9 |" in text
    assert "| llorch, cpu | 0.004 | 90.0% |  | 200.0 | 26.0 | 9 |" in text
    assert "| decode, cpu to Q8_0 | >= 1.1 | 1.30 (1.30 to 1.30) | yes |" in text
    assert "| decode, Q8_0, the same | >= 1.1 | 1.20 (1.20 to 1.20) | yes |" in text
    assert "| decode, Q4_0, the same | >= 1.1 | 1.05 (1.05 to 1.05) | **no** |" in text
    assert "| prefill, cpu to Q8_0 |  | 2.00 (2.00 to 2.00) |  |" in text
