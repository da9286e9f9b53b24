"""SmolLM2-135M-Instruct from checkpoint to answer, held against transformers running the same file in
fp32.
"""

from __future__ import annotations

import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.requests import GenerationRequest, TextPrompt, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.harness.processes import llorch, llorch_here

pytestmark = pytest.mark.real_model

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "Water boils at",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "La capitale de l'Italie est",
    "In 1969, two astronauts",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 5, 8, 13,",
)
TOKENS = 64


def generate(model, *flags):
    return llorch_here("generate", model, *flags, "--json").document()


@pytest.fixture(scope="module")
def reference(smollm2_reference):
    """Token ids -> the id that the reference finds likeliest after each of them."""
    import torch

    def likeliest(ids):
        with torch.inference_mode():
            return smollm2_reference(torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()

    return likeliest


@pytest.mark.reference
def test_fp32_gives_the_reference_tokens(smollm2_worker, reference):
    sampling = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=TOKENS, ignore_eos=True)
    with WorkerClient(smollm2_worker("fp32").address) as client:
        for index, prompt in enumerate(PROMPTS):
            ids, _ = client.tokenize(TextPrompt(prompt))
            updates = client.generate(GenerationRequest(f"prompt-{index}", TokenPrompt(ids), sampling))
            found = [id_ for update in updates for id_ in update.token_ids]
            assert len(found) == TOKENS
            # The reference's greedy answer is, by induction, the one whose every token it finds likeliest.
            assert found == reference([*ids, *found])[len(ids) - 1 : -1], prompt


@pytest.fixture(scope="module")
def verified(smollm2, smollm2_gguf, tmp_path_factory):
    """What ``llorch verify`` says of the fp32 artifact, and the file of the reference's log-probabilities."""
    kept = tmp_path_factory.mktemp("reference") / "kept"
    flags = ("--against", smollm2_gguf, "--write-reference", kept, "--json")
    return llorch("verify", smollm2("fp32"), *flags).document(), kept


@pytest.mark.reference
def test_divergence_from_the_reference(verified):
    document, _ = verified
    assert 0 <= document["kl"] <= 1e-6
    assert document["same_source"] is True
    assert document["text"] == "sample"
    assert document["tokens"] > 1000


@pytest.mark.reference
@pytest.mark.parametrize(("precision", "limit"), [("int8", 0.007), ("source", 0.005)])
def test_divergence_from_the_kept_reference(smollm2, verified, precision, limit):
    document = llorch_here("verify", smollm2(precision), "--reference", verified[1], "--json").document()
    assert 0 < document["kl"] <= limit
    assert document["tokens"] == 256


@pytest.mark.reference
def test_every_stage_is_the_references(smollm2, smollm2_gguf):
    flags = ("--against", smollm2_gguf, "--layers", "--json")
    document = llorch("verify", smollm2("fp32"), *flags).document()
    assert document["first_departing"] is None
    assert len(document["stages"]) == 30 * 16 + 5
    worst = dict.fromkeys(("RMSNorm", "RoPE", "logits"), 0.0)
    for stage in document["stages"]:
        if stage["kind"] in worst:
            worst[stage["kind"]] = max(worst[stage["kind"]], stage["distance"])
    assert worst["RMSNorm"] <= 1e-5
    assert worst["RoPE"] <= 1e-5
    assert worst["logits"] <= 1e-3


def test_it_knows_the_capital_of_france(smollm2_worker):
    flags = ("--chat", "What is the capital of France?", "--max-tokens", "60")
    outcome = llorch("generate", "--connect", smollm2_worker("fp32").address, *flags)
    assert outcome.code == 0
    assert "Paris" in outcome.stdout


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_without_kv_cache_the_text_is_the_same(smollm2, precision):
    # Over int8 one of the two would read rounded keys and values.
    flags = ("--prompt", PROMPTS[1], "--temperature", "0", "--max-tokens", "20", "--kv-dtype", "float32")
    kept, computed_anew = (generate(smollm2(precision), *flags, *f) for f in ((), ("--no-kv-cache",)))
    assert len(kept["token_ids"]) == 20
    assert computed_anew["token_ids"] == kept["token_ids"]


SMALLEST = ("--block-size", "64", "--head-precision", "int4")


@pytest.mark.parametrize(
    "flags", [(), pytest.param(SMALLEST, marks=pytest.mark.slow)], ids=["default", "smallest"]
)
def test_int4_runs(smollm2, flags):
    document = generate(smollm2("int4", *flags), "--prompt", PROMPTS[1], "--max-tokens", "20", "--ignore-eos")
    assert len(document["token_ids"]) == 20
    assert document["text"].strip()
