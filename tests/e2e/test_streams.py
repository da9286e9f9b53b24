"""Answers of the real model through a worker process: streams that run together, long prompts, many
scripts.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from llorch_serve.bench.workload import sample_text
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import ChatMessage, ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from support.harness.processes import PATIENCE_S

pytestmark = pytest.mark.real_model

# (prompt, tokens to generate): short and long, the longest prefilled in several chunks while others decode.
WORK = (
    (TextPrompt("The"), 60),
    (TextPrompt("Once upon a time, in a small village by the sea,"), 48),
    (ChatPrompt((ChatMessage("user", "What is the capital of France?"),)), 40),
    (TextPrompt(sample_text()[:2500]), 24),
    (TokenPrompt((504, 253)), 56),
    (TextPrompt("def fibonacci(n):\n"), 32),
    (ChatPrompt((ChatMessage("user", "Count to twenty."),)), 48),
    (TextPrompt(sample_text()[-900:]), 40),
)
LATE = 3  # so many streams join when the first has been answering for a while


@pytest.fixture
def client(smollm2_worker):
    # Over a cache in int8 a prefix that is taken up again is one that was rounded. Every token comes in a
    # message of its own.
    with WorkerClient(
        smollm2_worker("int8", "--no-prefix-cache", "--stream-interval", "1").address
    ) as client:
        yield client


def request(index, seeded):
    prompt, tokens = WORK[index]
    if seeded:
        sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=1000 + index, max_tokens=tokens)
    else:
        sampling = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=tokens)
    return GenerationRequest(f"stream-{index}", prompt, sampling)


def collect(updates, after=None):
    """Return token ids and text of an answer; call ``after`` with the number of tokens at each update."""
    ids, text = [], []
    for update in updates:
        ids.extend(update.token_ids)
        text.append(update.text)
        if after is not None:
            after(len(ids))
    return ids, "".join(text)


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_streams_together_give_what_each_gives_alone(client, seeded):
    alone = [collect(client.generate(request(i, seeded))) for i in range(len(WORK))]
    under_way = threading.Event()

    def run(index):
        if index >= len(WORK) - LATE:
            assert under_way.wait(PATIENCE_S)
        after = (lambda count: count >= 5 and under_way.set()) if index == 0 else None
        return collect(client.generate(request(index, seeded)), after)

    with ThreadPoolExecutor(len(WORK)) as pool:
        together = list(pool.map(run, range(len(WORK))))
    assert together == alone
    assert len({tuple(ids) for ids, _ in alone}) == len(WORK)
    assert sum(len(ids) for ids, _ in alone) > 200


def test_seeds_matter(client):
    greedy, seeded = (collect(client.generate(request(1, s)))[0] for s in (False, True))
    assert greedy != seeded


@pytest.mark.parametrize("length", [1, 100, 1000])
def test_prompts_of_any_length_give_a_hundred_tokens(client, length):
    ids, _ = client.tokenize(TextPrompt(sample_text()))
    sampling = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    updates = list(client.generate(GenerationRequest("long", TokenPrompt(ids[:length]), sampling)))
    completion = updates[-1].completion
    assert completion.prompt_tokens == length
    assert (completion.generated_tokens, completion.reason) == (100, FinishReason.LENGTH)


@pytest.mark.parametrize(
    "pattern", ["🙂🚀", "東京タワー、", "Привет, мир! "], ids=["emoji", "cjk", "cyrillic"]
)
def test_characters_of_several_tokens_are_streamed_whole(client, pattern):
    sampling = SamplingParams(temperature=0, repetition_penalty=1, max_tokens=48, ignore_eos=True)
    updates = list(client.generate(GenerationRequest("text", TextPrompt(pattern * 8), sampling)))
    text = "".join(update.text for update in updates)
    ids = tuple(id_ for update in updates for id_ in update.token_ids)
    assert text == client.detokenize(ids)
    assert set(pattern) & set(text) - {" "}
    # Only the very end of an answer that was cut short may hold an unfinished character.
    assert all("\ufffd" not in update.text for update in updates[:-1])
    assert any(update.token_ids and not update.text for update in updates)  # some were held back
