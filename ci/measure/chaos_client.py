"""A client of its own process, made to be killed.

    ci/measurement chaos_client ADDRESS PROMPT_TOKENS MAX_TOKENS

Prints ``up``, waits for a line on stdin, asks for a stream, prints ``asked``, and ``token`` for every message
with tokens.
"""

from __future__ import annotations

import random
import sys

import grpc

from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc import worker_pb2_grpc


def request(prompt_tokens: int, max_tokens: int, *, seed: int = 0) -> pb.GenerateStreamRequest:
    """Return a greedy request whose prompt is like no other seed's, of token ids that every model has."""
    ids = random.Random(seed).choices(range(8, 256), k=prompt_tokens)
    sampling = pb.Sampling(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateStreamRequest(
        request=pb.GenerateRequest(input=pb.Input(tokens=pb.TokenInput(ids=ids)), sampling=sampling)
    )


def say(word: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(address: str, prompt_tokens: int, max_tokens: int) -> None:
    """Run as a script says."""
    with grpc.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.GenerationServiceStub(channel)
        say("up")
        seed = int(sys.stdin.readline())
        stream = stub.GenerateStream(request(prompt_tokens, max_tokens, seed=seed))
        say("asked")
        for response in stream:
            if response.token_ids:
                say("token")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
