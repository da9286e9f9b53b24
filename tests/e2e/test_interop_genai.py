"""onnxruntime-genai itself loads what ``--interop genai`` writes, and answers as llorch does.

Needs an interpreter with onnxruntime-genai, named by LLORCH_GENAI_PYTHON; ``ci/test-genai`` makes one and
runs this.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llorch_serve.bench.workload import sample_text
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.arch_rows import HF
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny, random_ids
from support.harness.processes import interpreter, llorch_here

pytestmark = pytest.mark.genai

RUNNER = Path(__file__).resolve().parents[1] / "support" / "harness" / "run_genai.py"
STEPS = 32
TEXTS = (
    "The capital of France is",
    "Once upon a time, there was a little robot who",
    "def fibonacci(n):\n    if n <",
    "Water boils at 100 degrees Celsius; ice melts at",
)
CHAT = "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n"
ODD_TEXTS = ("the  world", "hello world\n\n\tuser", " the end ", "Größe 你好 🙂")
FAMILIES = [
    "yarn",
    "heads of 8",
    "mistral, window",
    "qwen2",
    "qwen3",
    "smollm3",
    "granite",
    "phi3",
    "gemma2",
    "gemma3",
    "phi",
    "olmo2",
    "cohere2",
]

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask() -> Ask:
    """Return a function that puts questions to onnxruntime-genai."""
    python = interpreter("LLORCH_GENAI_PYTHON", "ci/test-genai")

    def ask(
        folder: Path,
        texts: Sequence[str] = (),
        prompts: Sequence[list[int]] = (),
        batch: Sequence[list[int]] = (),
    ) -> dict[str, Any]:
        questions = {"texts": list(texts), "prompts": list(prompts), "batch": list(batch), "steps": STEPS}
        done = subprocess.run(
            [python, RUNNER, folder], input=json.dumps(questions), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return ask


def generated(folder: Path, prompt: list[int]) -> list[int]:
    """Return what ``llorch generate`` chooses over a cache in float32, as onnxruntime-genai's is."""
    steps = str(STEPS)
    flags = (
        "--temperature",
        "0",
        "--max-tokens",
        steps,
        "--min-tokens",
        steps,
        "--kv-dtype",
        "float32",
        "--json",
    )
    document = llorch_here("generate", folder, "--prompt-ids", ",".join(map(str, prompt)), *flags).document()
    found: list[int] = document["token_ids"]  # type: ignore[assignment]  # a list of ids
    return found


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("precision", "flags"), [("fp32", ()), ("int8", ()), ("int8", ("--activations", "row"))]
)
def test_the_real_model_gives_the_same_tokens(
    ask: Ask, smollm2: Callable[..., Path], precision: str, flags: tuple[str, ...]
) -> None:
    folder = smollm2(precision, "--interop", "genai", *flags)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    prompts = [list(tokenizer.encode(text, add_special_tokens=True)) for text in (*TEXTS, CHAT)]
    expected = [generated(folder, prompt) for prompt in prompts]
    found = ask(folder, (*TEXTS, CHAT), prompts, prompts)
    assert found["texts"] == prompts
    assert found["prompts"] == expected
    if precision == "fp32":  # int8 activations may turn where rows share a call
        assert found["batch"] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_tokens(ask: Ask, tmp_path: Path, family: str) -> None:
    artifact = export_tiny(write_hf_folder(tmp_path / "model", HF[family]), tmp_path / "out", interop="genai")
    prompts = [random_ids(5, seed=1), random_ids(40, seed=2)]
    expected = [generated(artifact.folder, prompt) for prompt in prompts]
    found = ask(artifact.folder, prompts=prompts, batch=prompts)
    assert found["prompts"] == expected
    assert found["batch"] == expected


def sentencepiece_like() -> str:
    """Return a byte-fallback BPE tokenizer as Llama 2's, that puts BOS in front of text."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=512, show_progress=False, special_tokens=names)
    made.train_from_iterator(sample_text().splitlines(), trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    document = json.loads(made.to_str())
    document["pre_tokenizer"] = None  # a help in training only
    document["added_tokens"] = [token for token in document["added_tokens"] if token["id"] < 3]
    return json.dumps(document)


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_text_becomes_the_same_tokens_and_they_the_same_text(ask: Ask, tmp_path: Path, kind: str) -> None:
    if kind == "byte level":
        source = write_hf_folder(tmp_path / "model")
    else:
        ids, names = {"bos_token_id": 1, "eos_token_id": 2}, {"bos_token": "<s>", "eos_token": "</s>"}
        source = write_hf_folder(tmp_path / "model", ids, tokenizer_config=names)
        (source / "tokenizer.json").write_text(sentencepiece_like())
    folder = export_tiny(source, tmp_path / "out", interop="genai").folder
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    found = ask(folder, texts=ODD_TEXTS)
    assert found["texts"] == [list(tokenizer.encode(text, add_special_tokens=True)) for text in ODD_TEXTS]
    assert [text.lstrip() for text in found["decoded"]] == [text.lstrip() for text in ODD_TEXTS]
