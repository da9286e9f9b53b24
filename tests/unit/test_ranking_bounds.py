"""How much text a request to rank may have: its query is read again with each document."""

from __future__ import annotations

import pytest

from llorch_serve.errors import InvalidRequestError
from llorch_serve.requests import ChatPrompt, RankRequest
from llorch_serve.worker.ranking import MAX_DOCUMENTS, Ranking
from llorch_serve.worker.scoring import MAX_SCORED_CHARS


class Encoder:
    """Counts what it is given. Implements what Ranking needs of PromptEncoder."""

    read = 0

    def encode(self, prompt: ChatPrompt, *, context: int) -> tuple[tuple[int, ...], str]:
        self.read += sum(len(message.content or "") for message in prompt.messages)
        return (1, 2, 3), ""


@pytest.mark.parametrize("field", ["query", "instruction"])
def test_what_is_read_with_every_document_is_bounded_together(field: str) -> None:
    encoder = Encoder()
    ranking = Ranking(encoder, 1, 2)  # type: ignore[arg-type]  # see Encoder
    texts = {"query": "q", "instruction": "i", field: "a" * (MAX_SCORED_CHARS // MAX_DOCUMENTS)}
    request = RankRequest("r", documents=("",) * MAX_DOCUMENTS, **texts)
    with pytest.raises(InvalidRequestError, match=r"^documents: found \d+ characters.*at most \d+.*send"):
        ranking.pairs(request, context=100)
    assert encoder.read == 0


def test_what_is_within_the_bound_is_read() -> None:
    encoder = Encoder()
    ranking = Ranking(encoder, 1, 2)  # type: ignore[arg-type]  # see Encoder
    request = RankRequest("r", "a" * 60_000, ("b",) * MAX_DOCUMENTS, instruction="i")
    assert len(ranking.pairs(request, context=100)) == 2 * MAX_DOCUMENTS
    assert encoder.read > 60_000 * MAX_DOCUMENTS
