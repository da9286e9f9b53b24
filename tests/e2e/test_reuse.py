"""Cached prefixes, guesses and memory in tokens, through real worker processes and the command line."""

from __future__ import annotations

import pytest

from llorch_serve.artifact.folder import load_artifact
from llorch_serve.bench.workload import sample_text
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.errors import LlorchError
from llorch_serve.requests import GenerationRequest, TextPrompt, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from measure.reuse_divergence import reuse_divergence
from support.harness.processes import llorch_here, serving

GREEDY = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=24, ignore_eos=True)
PROMPT = TokenPrompt(tuple(100 + i % 40 for i in range(60)))


def answer(client, request):
    updates = list(client.generate(request))
    return [token for update in updates for token in update.token_ids], updates[-1].completion


def test_the_same_prompt_again_is_cached_and_answered_alike(tiny):
    with serving(tiny, "--kv-dtype", "float32") as worker, WorkerClient(worker.address) as client:
        cold, first = answer(client, GenerationRequest("a", PROMPT, GREEDY))
        warm, second = answer(client, GenerationRequest("b", PROMPT, GREEDY))
        assert (first.cached_tokens, second.cached_tokens) == (0, 58)
        assert warm == cold
        load = client.load()
        assert (load.running, load.waiting, load.slots) == (0, 0, 8)
        # The warm-up's eight tokens and its two answers are in the totals too.
        assert load.cached_tokens == 58
        assert load.prompt_tokens == 2 * 60 + 8
        assert load.generated_tokens == 2 * 24 + 2
        assert load.kv_tokens_running == 0 < load.kv_tokens_idle
        assert load.kv_tokens_total == 8 * 128


def test_strict_reuse_takes_what_was_prefilled_alone(tiny):
    def conversation(client):
        ids, _ = answer(client, GenerationRequest("a", PROMPT, GREEDY))
        following = TokenPrompt((*PROMPT.token_ids, *ids, 7, 8))
        return answer(client, GenerationRequest("b", following, GREEDY))[1].cached_tokens

    with serving(tiny) as worker, WorkerClient(worker.address) as client:
        assert conversation(client) == 60 + 23
    with serving(tiny, "--strict-reuse") as worker, WorkerClient(worker.address) as client:
        assert conversation(client) == 60
    with serving(tiny, "--no-prefix-cache") as worker, WorkerClient(worker.address) as client:
        assert conversation(client) == 0


def test_a_small_cache_is_shared_and_said_aloud(tiny):
    # 2 layers, 2 heads of 16, keys and values in float32: 512 bytes a token.
    flags = ("--kv-cache-memory", f"{512 * 200}", "--max-context", "128", "--slots", "4")
    with serving(tiny, *flags, "--kv-dtype", "float32") as worker, WorkerClient(worker.address) as client:
        assert any("4 slots of 128 tokens share 200 tokens" in line for line in worker.command.log)
        assert client.load().kv_tokens_total == 200
        assert client.model_info().context_length == 128
        requests = [GenerationRequest(f"r{i}", TokenPrompt((i + 1,) * 70), GREEDY) for i in range(4)]
        streams = [client.generate(request) for request in requests]
        for stream in streams:
            assert sum(len(update.token_ids) for update in stream) == 24


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-cache-memory", "lots"), "expected a number of bytes, like 2GiB"),
        (("--kv-cache-memory", "0"), "expected a number of bytes, like 2GiB"),
        (("--kv-cache-memory", "900TiB"), "are free beside the weights"),
        (("--kv-cache-memory", "1KiB", "--max-context", "100"), "choose a smaller --max-context"),
        (("--strict-reuse", "--no-prefix-cache"), "leave one of them out"),
    ],
)
def test_what_cannot_be_is_refused(tiny, flags, words):
    outcome = llorch_here("serve", tiny, "--port", "0", *flags)
    assert outcome.code in (2, 6)
    assert words in outcome.stderr.splitlines()[-1]


def test_guesses_change_no_token_and_are_reported(tiny):
    ids = ",".join(str(100 + i % 5) for i in range(40))
    flags = ("--prompt-ids", ids, "--max-tokens", "60", "--temperature", "0", "--ignore-eos", "--json")
    plain = llorch_here("generate", tiny, *flags).document()
    guessed = llorch_here("generate", tiny, *flags, "--lookup", "8").document()
    assert guessed["token_ids"] == plain["token_ids"]
    assert plain["drafted_tokens"] == plain["accepted_tokens"] == 0
    assert guessed["drafted_tokens"] >= guessed["accepted_tokens"] > 0
    sampled = [
        llorch_here("generate", tiny, *flags[:4], "--temperature", "0.9", "--seed", "3", "--json", *more)
        for more in ((), ("--lookup", "8"))
    ]
    assert sampled[0].document()["token_ids"] == sampled[1].document()["token_ids"]


def test_guesses_without_a_cache_are_refused(tiny):
    outcome = llorch_here("generate", tiny, "--prompt-ids", "1", "--no-kv-cache", "--lookup", "4")
    assert outcome.code == 2
    assert "--lookup has no effect" in outcome.error()


@pytest.mark.real_model
def test_a_real_model_repeats_a_text_with_guesses_as_without(smollm2):
    text = (
        "Repeat this text word for word:\n\n"
        + sample_text()[:900]
        + "\n\nThe text again:\n\n"
        + sample_text()[:60]
    )
    flags = ("--prompt", text, "--max-tokens", "96", "--temperature", "0", "--json")
    artifact = smollm2("fp32")
    plain = llorch_here("generate", artifact, *flags).document()
    guessed = llorch_here("generate", artifact, *flags, "--lookup", "16").document()
    assert guessed["token_ids"] == plain["token_ids"]
    assert guessed["accepted_tokens"] > 20


@pytest.mark.real_model
def test_a_real_conversation_goes_on_from_its_cache(smollm2_worker):
    with WorkerClient(smollm2_worker("int8", "--kv-dtype", "float32").address) as client:
        prompt = TextPrompt(sample_text()[:1500])
        cold, first = answer(client, GenerationRequest("a", prompt, GREEDY))
        warm, second = answer(client, GenerationRequest("b", prompt, GREEDY))
        assert second.cached_tokens == first.prompt_tokens - 2
        assert warm == cold
        assert second.timings.prefill_s < first.timings.prefill_s


@pytest.mark.real_model
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "int8"])
def test_decoded_prefixes_stay_within_the_recipes_limit(smollm2, precision):
    # It is what allows reusing them without being asked.
    artifact = load_artifact(smollm2(precision))
    found = reuse_divergence(artifact)
    assert found.tokens == 512
    assert 0 < found.kl < artifact.manifest.recipe.kl_limit


def test_a_prompt_beyond_the_budget_is_refused_like_one_beyond_the_context(tiny):
    flags = ("--kv-cache-memory", f"{512 * 50}", "--max-context", "50")
    request = GenerationRequest("a", TokenPrompt((1,) * 60), GREEDY)
    with (
        serving(tiny, *flags) as worker,
        WorkerClient(worker.address) as client,
        pytest.raises(LlorchError, match="50"),
    ):
        list(client.generate(request))


def test_a_cache_in_int8_has_room_for_four_times_the_tokens(tiny):
    flags = ("--kv-cache-memory", f"{512 * 200}", "--max-context", "128", "--slots", "8")
    with serving(tiny, *flags) as worker, WorkerClient(worker.address) as client:
        assert client.load().kv_tokens_total == 4 * 200
        first, _ = answer(client, GenerationRequest("a", PROMPT, GREEDY))
        again, usage = answer(client, GenerationRequest("b", PROMPT, GREEDY))
        assert usage.cached_tokens == 58
        assert len(first) == len(again) == 24
