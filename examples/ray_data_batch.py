"""Answers the rows of Parquet files by Ray Data's ``map_batches`` and a running worker, or a cluster's front.

    pip install 'llorch[cpu]' 'ray[data]'
    llorch serve artifacts/smollm2 --port 50051 &
    python examples/ray_data_batch.py prompts.parquet answers 127.0.0.1:50051

Rows have ``custom_id`` and ``prompt``; those of ``answers`` also have ``text``, ``finish_reason`` and the
tokens. A job that is run again leaves out the rows that are in ``answers`` already. Where one file on one
machine is enough, ``llorch batch`` does more: docs/batch.md.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.errors import QueueFullError, UnavailableError, UnreachableError
from llorch_serve.requests import GenerationRequest, GenerationUpdate, TextPrompt
from llorch_serve.sampling.params import SamplingParams

Batch = dict[str, np.ndarray]

PATIENCE_S = 300.0
MAX_TOKENS = 64


class Answers:
    """Answers batches of rows; each of Ray's actors has one. in_flight: requests at once."""

    def __init__(self, address: str, in_flight: int = 8) -> None:
        self._address = address
        self._in_flight = in_flight

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with its answers."""
        return asyncio.run(self._answer_all(batch))

    async def _answer_all(self, batch: Batch) -> Batch:
        room = asyncio.Semaphore(self._in_flight)
        async with AsyncWorkerClient(self._address) as client:

            async def answer(custom_id: str, prompt: str) -> GenerationUpdate:
                async with room:
                    return await _patiently(client, custom_id, prompt)

            pairs = zip(batch["custom_id"], batch["prompt"], strict=True)
            found = await asyncio.gather(*(answer(str(name), str(prompt)) for name, prompt in pairs))
        ends = [one.completion for one in found if one.completion is not None]
        return batch | {
            "text": np.array([one.text for one in found], dtype=object),
            "finish_reason": np.array([end.reason.value for end in ends], dtype=object),
            "prompt_tokens": np.array([end.prompt_tokens for end in ends]),
            "completion_tokens": np.array([end.generated_tokens for end in ends]),
        }


async def _patiently(client: AsyncWorkerClient, custom_id: str, prompt: str) -> GenerationUpdate:
    """Return the answer to one row, which is asked for again while the worker is busy or away."""
    # The same row has the same answer, whenever it is asked for.
    seed = int.from_bytes(hashlib.sha256(custom_id.encode()).digest()[:8]) >> 1
    sampling = SamplingParams(temperature=0.7, seed=seed, max_tokens=MAX_TOKENS)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                request = GenerationRequest(str(uuid.uuid4()), TextPrompt(prompt), sampling)
                [answer] = await client.complete(request)
            except QueueFullError as error:
                await asyncio.sleep(error.retry_after_s)
            except (UnavailableError, UnreachableError):
                await asyncio.sleep(1)
            else:
                return answer


def answered(folder: Path) -> set[str]:
    """Return the ids of the rows that earlier jobs answered."""
    from pyarrow import dataset

    if not folder.is_dir() or not any(folder.glob("*.parquet")):
        return set()
    table = dataset.dataset(folder, format="parquet").to_table(columns=["custom_id"])
    return {str(name) for name in table["custom_id"].to_pylist()}


def main() -> None:
    """Answer what is not answered yet."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help="Parquet file, or a folder of them")
    parser.add_argument("output", type=Path, help="folder of the answers")
    parser.add_argument("address", help="HOST:PORT of a worker, or of a cluster's front")
    parser.add_argument("--actors", type=int, default=2)
    asked = parser.parse_args()
    done = answered(asked.output)

    def is_new(row: dict[str, Any]) -> bool:
        return str(row["custom_id"]) not in done

    rows = ray.data.read_parquet(asked.source)
    found = rows.filter(is_new).map_batches(
        Answers,
        fn_constructor_args=(asked.address,),
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=asked.actors),
        num_cpus=0,  # they wait for a worker, which has the processors
    )
    found.write_parquet(str(asked.output), mode="append")


if __name__ == "__main__":
    main()
