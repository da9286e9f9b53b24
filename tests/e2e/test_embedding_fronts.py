"""Vectors over gRPC, HTTP and Python, from an artifact that was exported to embed texts."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llorch
from llorch_serve.artifact.folder import Artifact
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.config import EngineConfig
from llorch_serve.errors import InvalidRequestError, ModelMismatchError, UnsupportedError
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.settings import HttpSettings
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.loading.worker import AnyWorker, load_any, load_worker
from llorch_serve.requests import EmbedRequest, GenerationRequest, TextPrompt, TokenPrompt
from llorch_serve.rpc import worker_pb2 as pb
from support.builders.checkpoints import write_hf_folder
from support.builders.tiny_exports import export_tiny
from support.harness.batches import begin, client_of, results, wait_for
from support.harness.http import Answer, running_front, send
from support.harness.rpc import open_stub

TEXTS = ["The quick brown fox", "Paris is the capital of France", "x"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("embedding")
    return export_tiny(write_hf_folder(folder / "model"), folder / "artifact", embed="last")


@pytest.fixture(scope="module")
def worker(artifact: Artifact) -> Iterator[AnyWorker]:
    made = load_any(artifact.folder, EngineConfig(), lambda report: None)
    made.warm_up()
    yield made
    made.close()


@pytest.fixture(scope="module")
def front(worker: AnyWorker) -> Iterator[Any]:
    with running_front(worker, settings=HttpSettings(unknown=UnknownFields.IGNORE)) as running:
        yield running


def ask(front: Any, **body: Any) -> Answer:
    return send(front.port, "POST", "/v1/embeddings", body)


def vectors(answer: Answer) -> list[list[float]]:
    assert answer.status == 200, answer.body
    assert [each["index"] for each in answer.document["data"]] == list(range(len(answer.document["data"])))
    return [each["embedding"] for each in answer.document["data"]]


def test_http_rpc_and_python_give_the_same_bits(artifact: Artifact, front: Any) -> None:
    over_http = np.array(vectors(ask(front, input=TEXTS)), np.float32)
    request = EmbedRequest("r", tuple(map(TextPrompt, TEXTS)))
    with WorkerClient(front.rpc) as client:
        over_rpc = np.stack([each.values for each in client.embed(request)])
    with llorch.load(artifact.folder) as model:
        in_process = np.stack(model.embed(TEXTS))
    with llorch.connect(front.rpc) as model:
        connected = np.stack(model.embed(TEXTS))
    for found in (over_rpc, in_process, connected):
        np.testing.assert_array_equal(over_http, found)
    np.testing.assert_allclose(np.linalg.norm(over_http, axis=1), 1, atol=1e-6)


def test_a_batch_over_http_has_the_same_vectors(worker: AnyWorker, front: Any, tmp_path: Path) -> None:
    lines = [
        {"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
        for text in TEXTS
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    settings = HttpSettings(batches=BatchSettings(tmp_path))
    with running_front(worker, settings=settings) as running, client_of(running.port) as client:
        ended = wait_for(client, begin(client, content, endpoint="/v1/embeddings").id)
        assert ended.status == "completed"
        found = results(client, ended.output_file_id)
        assert ended.usage.input_tokens == ended.usage.total_tokens > len(TEXTS)
    together = vectors(ask(front, input=TEXTS))
    assert [found[text]["response"]["body"]["data"][0]["embedding"] for text in TEXTS] == together


def test_every_shape_of_input_and_both_formats(worker: AnyWorker, front: Any) -> None:
    ids = [list(worker.tokenize(TextPrompt(text))[0]) for text in TEXTS]
    plain = vectors(ask(front, input=TEXTS))
    assert vectors(ask(front, input=ids)) == plain
    assert vectors(ask(front, input=TEXTS[0])) == plain[:1]
    assert vectors(ask(front, input=ids[0], user="somebody", encoding_format=None)) == plain[:1]
    coded = vectors(ask(front, input=TEXTS, encoding_format="base64"))
    decoded = [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in coded]  # type: ignore[arg-type]
    assert decoded == plain
    answer = ask(front, input=TEXTS).document
    assert answer["usage"] == {"prompt_tokens": sum(map(len, ids)), "total_tokens": sum(map(len, ids))}
    assert (answer["object"], answer["model"], answer["data"][0]["object"]) == ("list", "model", "embedding")


def test_dimensions_and_cut_texts_over_http(front: Any) -> None:
    (short,) = vectors(ask(front, input=TEXTS[0], dimensions=16))
    (whole,) = vectors(ask(front, input=TEXTS[0]))
    np.testing.assert_allclose(short, np.array(whole[:16]) / np.linalg.norm(whole[:16]), rtol=1e-5)
    refused = ask(front, input=["a", "word " * 300])
    assert refused.status == 400
    assert refused.document["error"]["param"] == "input[1]"
    assert "truncate_prompt_tokens" in refused.document["error"]["message"]
    assert len(vectors(ask(front, input=["a", "word " * 300], truncate_prompt_tokens=-1))) == 2


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", 1]}, 400, "input"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": 5}, 400, "input"),
        ({"input": [[]]}, 400, "input[0]"),
        ({"input": [[9999]]}, 400, "input[0]"),
        ({"input": "a", "dimensions": 65}, 400, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "a", "model": "another"}, 404, "model"),
    ],
)
def test_bad_bodies_are_refused_by_field(front: Any, body: dict[str, Any], status: int, param: str) -> None:
    answer = ask(front, **body)
    assert (answer.status, answer.document["error"]["param"]) == (status, param)


def test_unknown_fields_are_listed_where_they_are_left_aside(front: Any) -> None:
    assert ask(front, input="a", input_type="query").document["llorch"] == {"ignored": ["input_type"]}


def test_generation_is_refused_over_each_front(front: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/score", {"context": "a", "continuations": ["b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        answer = send(front.port, "POST", path, body)
        assert answer.status == 422
        assert "embeds texts" in answer.document["error"]["message"]
    with WorkerClient(front.rpc) as client, pytest.raises(UnsupportedError, match="embeds texts"):
        client.complete(GenerationRequest("g", TextPrompt("a")))


def test_rpc_refuses_by_field_and_tells_what_is_served(front: Any) -> None:
    with WorkerClient(front.rpc) as client:
        assert client.model_info().embedding_size == 64
        with pytest.raises(InvalidRequestError, match=r"inputs\[1\]"):
            client.embed(EmbedRequest("r", (TextPrompt("a"), TokenPrompt((9999,)))))
        with pytest.raises(InvalidRequestError, match="dimensions"):
            client.embed(EmbedRequest("r", (TextPrompt("a"),), dimensions=-1))
        with pytest.raises(ModelMismatchError):
            client.embed(EmbedRequest("r", (TextPrompt("a"),), fingerprint="0" * 64))
    with open_stub(front.rpc) as stub:
        response = stub.Embed(pb.EmbedRequest(inputs=[pb.Input(text="a")]))
        assert len(response.embeddings[0].values) == 64
        assert response.embeddings[0].token_count > 0


def test_a_model_that_generates_embeds_nothing(tmp_path: Path) -> None:
    plain = export_tiny(write_hf_folder(tmp_path / "model"), tmp_path / "artifact")
    generating = load_worker(plain.folder, EngineConfig(), lambda report: None)
    with running_front(generating) as running:
        answer = send(running.port, "POST", "/v1/embeddings", {"input": "a"})
        assert answer.status == 422
        assert "--embed last" in answer.document["error"]["message"]
    generating.close()
