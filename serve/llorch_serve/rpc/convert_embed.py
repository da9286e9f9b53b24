"""The bridge between protobuf's and our own requests and answers of ``Embed``, as ``convert.py`` is for the
rest.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llorch_serve.errors import FieldViolation, InvalidRequestError
from llorch_serve.requests import EmbedRequest, GenerationUpdate, TextEmbedding
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert import read_ids
from llorch_serve.rpc.convert_fields import set_field
from llorch_serve.rpc.convert_prompt import fill_input, read_input
from llorch_serve.worker.embeddings import MAX_TEXTS


def read_embed_request(message: pb.EmbedRequest, *, connection: str = "") -> EmbedRequest:
    """Return the request; ids that are not sent are chosen as for generation. Raises InvalidRequestError."""
    bad: list[FieldViolation] = []
    request_id = read_ids(message, bad)
    if len(message.inputs) > MAX_TEXTS:
        found = f"found {len(message.inputs)} texts, expected 1 to {MAX_TEXTS}"
        bad.append(FieldViolation("inputs", found))
        raise InvalidRequestError(bad)
    inputs = [read_input(item, bad, f"inputs[{index}]") for index, item in enumerate(message.inputs)]
    if bad:
        raise InvalidRequestError(bad)
    return EmbedRequest(
        request_id,
        tuple(prompt for prompt in inputs if prompt is not None),
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        truncate_prompt_tokens=message.truncate_prompt_tokens
        if message.HasField("truncate_prompt_tokens")
        else None,
        client_id=message.client_id or connection,
        priority=message.priority,
        fingerprint=message.fingerprint if message.HasField("fingerprint") else None,
    )


def write_embed_request(request: EmbedRequest) -> pb.EmbedRequest:
    """Return the message. Raises InvalidRequestError for values that no message can carry."""
    bad: list[FieldViolation] = []
    message = pb.EmbedRequest()
    set_field(message, "request_id", request.request_id, "request_id", bad)
    if request.client_id:
        set_field(message, "client_id", request.client_id, "client_id", bad)
    if request.priority:
        set_field(message, "priority", request.priority, "priority", bad)
    set_field(message, "fingerprint", request.fingerprint, "fingerprint", bad)
    for name in ("dimensions", "truncate_prompt_tokens"):
        set_field(message, name, getattr(request, name), name, bad)
    for index, text in enumerate(request.inputs):
        fill_input(message.inputs.add(), text, bad, f"inputs[{index}]")
    if bad:
        raise InvalidRequestError(bad)
    return message


def write_embeddings(request_id: str, updates: Iterable[GenerationUpdate]) -> pb.EmbedResponse:
    """Return the message of a request's vectors, one update for each."""
    response = pb.EmbedResponse(request_id=request_id)
    for update in sorted(updates, key=lambda update: update.index):
        found = update.embedding
        assert found is not None
        response.embeddings.add(values=found.values.tolist(), token_count=found.token_count)
    return response


def read_embeddings(message: pb.EmbedResponse) -> list[TextEmbedding]:
    """Return the vectors in the order of the texts."""
    return [TextEmbedding(np.array(each.values, np.float32), each.token_count) for each in message.embeddings]
