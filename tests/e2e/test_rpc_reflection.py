"""Calls as grpcurl makes them: services, methods and messages from the worker's reflection alone, requests
from JSON.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from llorch_serve.terminal import serve
from support.fakes.generator import PATIENCE_S

PAGE = Path(__file__).parents[2] / "docs" / "calling.md"


class Reflected:
    """Calls any method that a server's reflection describes. Knows nothing of it but its address."""

    def __init__(self, channel):
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self._database)

    def services(self):
        return set(self._database.get_services())

    def message(self, method, document):
        """Return a method's descriptor and the request that a JSON document stands for."""
        service, _, name = method.rpartition("/")
        found = self._pool.FindServiceByName(service).methods_by_name[name]
        return found, json_format.ParseDict(document, GetMessageClass(found.input_type)())

    def call(self, method, document):
        """Return the answers as JSON documents."""
        found, request = self.message(method, document)
        answer = GetMessageClass(found.output_type)
        assert not found.client_streaming
        make = self._channel.unary_stream if found.server_streaming else self._channel.unary_unary
        call = make(
            f"/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        got = call(request, timeout=PATIENCE_S)
        return [json_format.MessageToDict(one) for one in (got if found.server_streaming else [got])]


@pytest.fixture(scope="module")
def reflected(tiny_worker):
    with grpc.insecure_channel(tiny_worker.address) as channel:
        yield Reflected(channel)


def test_what_a_person_asks_first(reflected):
    assert reflected.services() == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "llorch.v1.GenerationService",
    }
    service = {"service": "llorch.v1.GenerationService"}
    assert reflected.call("grpc.health.v1.Health/Check", service) == [{"status": "SERVING"}]
    [info] = reflected.call("llorch.v1.GenerationService/GetModelInfo", {})
    assert (info["contextLength"], info["vocabSize"], info["slots"]) == (128, 512, 8)
    [load] = reflected.call("llorch.v1.GenerationService/GetLoad", {})
    assert load["state"].endswith("READY")
    assert load["loadPercent"] == 100


def test_an_answer_whole_and_in_parts(reflected):
    asked = {"input": {"text": "Paris"}, "sampling": {"temperature": 0, "maxTokens": 5, "ignoreEos": True}}
    [whole] = reflected.call("llorch.v1.GenerationService/Generate", asked)
    parts = reflected.call("llorch.v1.GenerationService/GenerateStream", {"request": asked})
    [choice] = whole["choices"]
    assert [token for part in parts for token in part.get("tokenIds", ())] == choice["tokenIds"]
    assert len(choice["tokenIds"]) == 5
    assert "completion" in parts[-1]
    [tokens] = reflected.call("llorch.v1.GenerationService/Tokenize", {"input": {"text": "Paris"}})
    [text] = reflected.call("llorch.v1.GenerationService/Detokenize", {"tokenIds": tokens["tokenIds"]})
    assert text["text"] == "Paris"


def test_a_refusal_can_be_read_without_stubs(reflected):
    with pytest.raises(grpc.RpcError) as refused:
        reflected.call(
            "llorch.v1.GenerationService/Generate", {"input": {"text": "a"}, "sampling": {"topP": 2}}
        )
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "top_p" in refused.value.details()


def documented():
    """Return every grpcurl command of the documents and of the help, as method and JSON text."""
    # The lines of a paragraph of the help are one line to whoever reads it.
    help_text = re.sub(r"(?<=\S)\n +(?=\S)", " ", serve.command.__doc__ or "")
    text = PAGE.read_text().replace("\\\n", " ") + help_text
    commands = [
        shlex.split(line.strip(" $")) for line in re.findall(r"^.*grpcurl -plaintext.*$", text, re.MULTILINE)
    ]
    return [(words[-1], words[words.index("-d") + 1]) for words in commands]


def test_the_documented_commands_are_calls_that_the_worker_describes(reflected):
    commands = documented()
    assert len(commands) == 2
    for method, text in commands:
        found, _ = reflected.message(method, json_format.json.loads(text))
        assert found.full_name == method.replace("/", ".")
    simplest = next(pair for pair in commands if pair[0].endswith("/Generate"))
    assert reflected.call(simplest[0], json_format.json.loads(simplest[1]))[0]["choices"][0]["tokenIds"]
