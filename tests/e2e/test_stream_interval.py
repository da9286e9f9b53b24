"""``llorch serve --stream-interval``: messages of a stream wait for tokens or time, and nothing of the answer
is lost.
"""

from __future__ import annotations

import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.requests import GenerationRequest, TokenPrompt
from llorch_serve.sampling.params import SamplingParams
from measure.serving_cost import OverHttp
from support.harness.processes import llorch, serving

TOKENS, INTERVAL = 22, 5
REQUEST = GenerationRequest(
    "one", TokenPrompt((5, 6, 7)), SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
)


def test_messages_wait_for_tokens_over_grpc_and_http(tiny):
    with serving(tiny) as worker, WorkerClient(worker.address) as client:
        expected = [token for update in client.generate(REQUEST) for token in update.token_ids]
    assert len(expected) == TOKENS
    with (
        serving(tiny, "--stream-interval", INTERVAL, "--http", 0) as worker,
        WorkerClient(worker.address) as client,
    ):
        sizes = [len(update.token_ids) for update in client.generate(REQUEST)]
        tokens = [token for update in client.generate(REQUEST) for token in update.token_ids]
        port = int(worker.command.wait_for_line(r"HTTP at http://\S+:(\d+)").group(1))
        chunks = [chunk for chunk in OverHttp(port).chunks(REQUEST) if chunk["choices"]]
    assert tokens == expected
    assert sum(sizes) == TOKENS
    assert all(size >= INTERVAL for size in sizes[1:-1])
    assert len(sizes) <= 2 + (TOKENS - 1) // INTERVAL
    assert len(chunks) <= 3 + (TOKENS - 1) // INTERVAL
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("value", ["0", "1025", "two"])
def test_a_number_that_is_none_is_refused(tiny, value):
    outcome = llorch("serve", tiny, "--stream-interval", value)
    assert outcome.code == 2
    assert "--stream-interval" in outcome.stderr
