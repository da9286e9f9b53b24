"""The perplexity of a text is the one that transformers finds, token by token, with windows as lm-eval's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from llorch_export.options import ExportOptions
from llorch_export.pipeline import export
from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.evaluation.asking import LocalModel
from llorch_serve.evaluation.perplexity import NamedText, measure_texts
from llorch_serve.evaluation.scores import ModelScores
from llorch_serve.loading.worker import load_worker
from llorch_serve.terminal.console import step_progress
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import silent
from tolerances import LOGPROBS

pytestmark = pytest.mark.reference

TEXT = "Straße\n\nOnce upon a time there was a small house by the river, and nobody lived in it. " * 6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("evaluated") / "source")


@pytest.fixture(scope="module")
def scores(source: Path) -> Iterator[ModelScores]:
    folder = source.parent / "artifact"
    export(ExportOptions(str(source), folder, precision="fp32"), silent)
    config = EngineConfig(SessionConfig(slots=2, threads=1))
    worker = load_worker(folder, config, lambda _report: None)
    yield ModelScores(LocalModel(worker), step_progress)
    worker.close()


@pytest.mark.parametrize(("window", "stride"), [(128, 128), (64, 64), (64, 16), (40, 1)])
def test_every_token_has_transformers_log_probability(
    source: Path, scores: ModelScores, window: int, stride: int
) -> None:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    expected = []
    for place, token in enumerate(ids):
        if place < window:
            context = [tokenizer.bos_token_id, *ids[:place]]
        else:
            end = min(window + ((place - window) // stride + 1) * stride, len(ids))
            context = ids[end - window - 1 : place]
        with torch.inference_mode():
            logits = model(torch.tensor([context])).logits[0, -1].double()
        expected.append(float(torch.log_softmax(logits, -1)[token]))
    assert scores.tokens(TEXT) == tuple(ids)
    assert scores.token_logprobs(ids, window, stride) == pytest.approx(expected, abs=LOGPROBS)
    [found] = measure_texts(scores, [NamedText("t", TEXT)], window=window, stride=stride)
    assert found.perplexity == pytest.approx(math.exp(-sum(expected) / len(ids)), rel=LOGPROBS)
