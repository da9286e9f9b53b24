"""``--batch-invariant`` through worker processes and the command line."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.requests import GenerationRequest, TextPrompt
from llorch_serve.sampling.params import SamplingParams
from support.harness.processes import llorch_here

pytestmark = pytest.mark.usefixtures("every_core")

PROMPT = "The three most important inventions of the nineteenth century were"
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5),
    "seeded": SamplingParams(temperature=1, seed=4, max_tokens=24, ignore_eos=True, logprobs=5),
}


@pytest.mark.parametrize("command", ["serve", "generate", "bench"])
def test_without_effect_it_is_refused(tiny, command):
    more = {"serve": ("--port", "0"), "generate": ("--prompt-ids", "1"), "bench": ("--streams", "1")}[command]
    outcome = llorch_here(command, tiny, *more, "--batch-invariant")
    assert outcome.code == 2
    assert "--batch-invariant has no effect here: int8" in outcome.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_it_does_not_go_with_guesses(tiny, command):
    more = ("--port", "0") if command == "serve" else ("--prompt-ids", "1")
    outcome = llorch_here(command, tiny, *more, "--batch-invariant", "--lookup", "4")
    assert outcome.code == 2
    assert "does not go with --lookup" in outcome.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_running_worker_has_its_own(command):
    more = ("--prompt", "x") if command == "generate" else ()
    outcome = llorch_here(command, "--connect", "127.0.0.1:1", "--batch-invariant", *more)
    assert outcome.code == 2
    assert "--batch-invariant" in outcome.stderr.splitlines()[-1]


@pytest.mark.real_model
@pytest.mark.parametrize("how", SAMPLINGS)
def test_a_real_model_in_int4_is_the_same_bits_among_others(smollm2_worker, how):
    address = smollm2_worker("int4", "--batch-invariant", "--no-prefix-cache").address

    def request(name, text, **changes):
        return GenerationRequest(name, TextPrompt(text), SAMPLINGS[how], **changes)

    def answer(updates):
        found = list(updates)
        places = [place for update in found for place in update.logprobs]
        ids = [token for update in found for token in update.token_ids]
        return ids, [(place.chosen.logprob, *(token.logprob for token in place.top)) for place in places]

    with WorkerClient(address) as client:
        assert client.model_info().batch_invariant
        alone = answer(client.generate(request("alone", PROMPT)))
        assert len(alone[0]) == 24
        assert answer(client.complete(request("unary", PROMPT))) == alone
        with ThreadPoolExecutor(7) as pool:
            texts = [PROMPT] * 3 + [f"{index}. Once upon a time " * (3 * index + 1) for index in range(4)]
            jobs = [
                pool.submit(lambda item: answer(client.generate(request(f"n{item[0]}", item[1]))), item)
                for item in enumerate(texts)
            ]
            together = [job.result() for job in jobs]
    assert together[:3] == [alone] * 3
