"""The bridge between protobuf's and our own log-probabilities of tokens."""

from __future__ import annotations

from collections.abc import Iterable

from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.sampling.logprobs import TokenLogprob, TokenLogprobs


def write_logprobs(places: Iterable[TokenLogprobs]) -> list[pb.TokenLogprobs]:
    """Return a message for each place."""
    return [pb.TokenLogprobs(chosen=_write(place.chosen), top=map(_write, place.top)) for place in places]


def read_logprobs(messages: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Return a place for each message."""
    return tuple(
        TokenLogprobs(_read(message.chosen), tuple(_read(item) for item in message.top))
        for message in messages
    )


def _write(token: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob, text=token.text, raw=token.raw)


def _read(message: pb.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.text, message.raw)
