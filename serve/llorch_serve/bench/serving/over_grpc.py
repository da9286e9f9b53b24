"""Requests of a benchmark over gRPC: each message says how many tokens it carries."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator

import grpc

from llorch_serve.bench.serving.records import CallError, Piece, Usage
from llorch_serve.bench.serving.work import Job
from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.errors import LlorchError
from llorch_serve.requests import GenerationRequest, GenerationUpdate
from llorch_serve.sampling.params import SamplingParams


class GrpcCall:
    """Implements :data:`llorch_serve.bench.serving.load.Call` for a worker's own service."""

    def __init__(self, client: AsyncWorkerClient) -> None:
        self._client = client

    async def __call__(self, job: Job) -> AsyncGenerator[Piece]:
        """Send a request; yield its answer's messages. Raises CallError with the name of gRPC's status."""
        sampling = SamplingParams(
            temperature=0, repetition_penalty=1, max_tokens=job.max_tokens, ignore_eos=True
        )
        try:
            async for update in self._client.generate(
                GenerationRequest(str(uuid.uuid4()), job.prompt, sampling)
            ):
                yield _piece(update)
        except LlorchError as error:
            raise CallError(_status(error), str(error)) from error


def _piece(update: GenerationUpdate) -> Piece:
    done = update.completion
    usage = None if done is None else Usage(done.prompt_tokens, done.cached_tokens, done.generated_tokens)
    return Piece(len(update.token_ids), usage)


def _status(error: LlorchError) -> str:
    """Return the name of the status that an error was read from; its class where none was, as for a message
    too large.
    """
    cause = error.__cause__
    return str(cause.code().name) if isinstance(cause, grpc.RpcError) else type(error).__name__
