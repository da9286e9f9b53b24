"""Draws from the likeliest tokens of a real model's logits, under settings that published models recommend in
their generation_config.json: the tokens that are drawn from all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
import pytest

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.config import SessionConfig
from llorch_serve.providers import CPU
from llorch_serve.runtime.leading_graph import LEADING, leading_model
from llorch_serve.runtime.opening import open_session
from llorch_serve.sampling.leading import Leading, leading_candidates, takes_leading
from llorch_serve.sampling.sampler import SamplingRow, draw_from_few, sample_batch
from llorch_serve.text.tokenizer import Tokenizer
from support.fakes.session import GREEDY

README: Final = Path(__file__).parents[2] / "README.md"
RECOMMENDED: Final[dict[str, dict[str, Any]]] = {
    "SmolLM2-135M-Instruct": {"temperature": 0.2, "top_p": 0.9},
    "Llama-3.2-1B-Instruct": {"temperature": 0.6, "top_p": 0.9},
    "Qwen3-0.6B": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "gemma-3-270m-it": {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
}
_WINDOW: Final = 128


@pytest.fixture(scope="module")
def rows(smollm2: Callable[..., Path]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The real model's logits after each of the README's first tokens."""
    artifact = load_artifact(smollm2("int8"))
    ids = Tokenizer.load(artifact.tokenizer_path).encode(README.read_text("utf-8"), add_special_tokens=False)
    session = open_session(artifact, SessionConfig(slots=1, max_context=2 * _WINDOW), lambda _: None)
    chunks = [
        session.prefill(0, ids[start : start + _WINDOW], start, range(_WINDOW)).copy()
        for start in range(0, 2 * _WINDOW, _WINDOW)
    ]
    return np.concatenate(chunks)


@pytest.mark.parametrize("asked", RECOMMENDED.values(), ids=RECOMMENDED)
def test_recommended_settings_are_drawn_from_the_likeliest_tokens(
    rows: np.ndarray[Any, np.dtype[np.float32]], asked: dict[str, Any]
) -> None:
    session = onnxruntime.InferenceSession(leading_model(rows.shape[1]), providers=[CPU])
    scale = np.full((len(rows), 1), 1 / asked["temperature"], np.float32)
    found = session.run(["ids", "scores", "totals"], {"logits": rows, "scale": scale})
    drawn = 0
    for seed, (logits, ids, scores, total) in enumerate(zip(rows, *found, strict=True)):
        row = SamplingRow.begin(replace(GREEDY, seed=seed, **asked), prompt_ids=[1], stop_ids=())
        assert takes_leading(row, LEADING)
        candidates = leading_candidates(Leading(ids, scores, float(total)), row.params, None)
        if candidates is not None:
            drawn += 1
            assert draw_from_few([candidates], [row]) == sample_batch(logits[None], [row])
    assert drawn > 0.8 * len(rows), "few rows' logits have to be fetched"
