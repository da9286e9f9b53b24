"""What crosses between a front and a replica comes out as it went in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from llorch_serve.cluster import wire, wire_requests
from llorch_serve.cluster.interfaces import Description, ReplicaLoad
from llorch_serve.cluster.wire_errors import read_error, write_error
from llorch_serve.config import CacheSharing
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import (
    CancelledError,
    EngineStoppedError,
    FieldViolation,
    InvalidRequestError,
    LibraryPanicError,
    LoggedError,
    ModelMismatchError,
    NonFiniteLogitsError,
    ProviderError,
    QueueFullError,
    ReplicaLostError,
    ResourceError,
    UnavailableError,
    UnsupportedError,
    WorkerError,
)
from llorch_serve.requests import (
    AnswerOptions,
    ChatMessage,
    ChatPrompt,
    Completion,
    ContinuationScore,
    EmbedRequest,
    EncodedPrompt,
    GenerationRequest,
    GenerationUpdate,
    RankRequest,
    ScoreRequest,
    TextEmbedding,
    TextPrompt,
    Timings,
    TokenPrompt,
    ToolCallDelta,
    ToolChoice,
    ToolMode,
)
from llorch_serve.sampling.logprobs import TokenLogprob, TokenLogprobs
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.structured.spec import JsonSchema
from support.fakes.generator import INFO, LOAD

WHOSE = {
    "client_id": "c",
    "owner": "token:1",
    "correlation_id": "abc",
    "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
    "priority": -3,
}
CHAT = ChatPrompt(
    (ChatMessage("system", "S"), ChatMessage("user", ("a", "b")), ChatMessage("assistant", "so ")),
    tools=('{"name": "f"}',),
    documents=('{"text": "d"}',),
    template_name="tool_use",
    template_arguments='{"x": 1}',
    continue_final_message=True,
    tool_choice=ToolChoice(ToolMode.REQUIRED, ("f",)),
    parallel_tool_calls=False,
)
PLACE = TokenLogprobs(
    TokenLogprob(3, -0.5, "\ufffd", b"\xc3"), (TokenLogprob(4, -9999.0, "é", "é".encode()),)
)
COMPLETION = Completion(FinishReason.LENGTH, "stop", 3, 4, 2**63 - 1, Timings(0.1, 0.2, 0.3), 1, 2, 1)


@pytest.mark.parametrize("prompt", [TextPrompt("é"), TextPrompt("x", add_special_tokens=False), CHAT])
def test_a_request_for_text_comes_out_as_it_was(prompt):
    sampling = SamplingParams(
        temperature=0.5, seed=2**63 - 1, stop=("a", "b"), logit_bias={3: -1.5}, structured=JsonSchema("{}")
    )
    answers = AnswerOptions(n=2, best_of=3, prompt_logprobs=0, echo=True)
    request = GenerationRequest("r", prompt, sampling, answers=answers, fingerprint="f", **WHOSE)
    assert wire_requests.read_generation(wire_requests.write_generation(request)) == request


def test_of_an_encoded_chat_only_what_decides_how_its_answer_is_read_goes_along():
    encoded = EncodedPrompt((1, 2, 2**32 - 1), "text")
    found = wire_requests.read_generation(
        wire_requests.write_generation(GenerationRequest("r", CHAT, encoded=encoded))
    )
    assert found.encoded == encoded
    assert found.prompt == replace(CHAT, messages=CHAT.messages[-1:], documents=(), template_arguments=None)


@pytest.mark.parametrize(("echo", "text"), [(True, "Hi"), (False, "")])
def test_of_an_encoded_text_the_tokens_go_along_and_the_words_if_they_are_told_again(echo, text):
    encoded = EncodedPrompt((1, 2), "Hi")
    request = GenerationRequest("r", TextPrompt("Hi"), answers=AnswerOptions(echo=echo), encoded=encoded)
    found = wire_requests.read_generation(wire_requests.write_generation(request))
    assert (found.prompt, found.encoded) == (TokenPrompt((1, 2)), EncodedPrompt((1, 2), text))


def test_other_requests_come_out_as_they_were():
    bare = TextPrompt("b", add_special_tokens=False)
    score = ScoreRequest("r", bare, (TextPrompt("a"), bare, TokenPrompt((1,))), 3, fingerprint="f", **WHOSE)
    assert wire_requests.read_score(wire_requests.write_score(score)) == score
    embed = EmbedRequest("r", (TextPrompt("a"), bare, CHAT, TokenPrompt((7,))), 8, -1, **WHOSE)
    assert wire_requests.read_embed(wire_requests.write_embed(embed)) == embed
    rank = RankRequest("r", "q", ("a", "é"), None, **WHOSE)
    assert wire_requests.read_rank(wire_requests.write_rank(rank)) == rank


def test_updates_come_out_as_they_were():
    score = ContinuationScore(-1.5, True, 2, 3, 1, (PLACE,))
    updates = [
        GenerationUpdate("r", "é", (1, 2), logprobs=(PLACE, PLACE), index=1, open_answers=3),
        GenerationUpdate("r", "", (), reasoning="hm", tool_calls=(ToolCallDelta(1, "i", "f", "{", True),)),
        GenerationUpdate("r", "", (), COMPLETION, open_answers=2, prompt_logprobs=(PLACE,)),
        GenerationUpdate("r", "", (), replace(COMPLETION, reason=FinishReason.CANCELLED), open_answers=1),
        GenerationUpdate("r", "", (), COMPLETION, score=score),
        GenerationUpdate("r", "", (), replace(COMPLETION, stop_logprobs=PLACE)),
    ]
    assert wire.read_updates("r", wire.write_updates(updates)) == updates


def test_vectors_come_out_bit_for_bit():
    values = np.array([0.1, -1e-30, 3e38], np.float32)
    update = GenerationUpdate("r", "", (), COMPLETION, embedding=TextEmbedding(values, 5))
    (found,) = wire.read_updates("r", wire.write_updates([update]))
    assert found.embedding.values.tobytes() == values.tobytes()
    assert found.embedding.token_count == 5


def test_descriptions_and_loads_come_out_as_they_were():
    description = Description(INFO, 17, "none", "think", "qwen3", CacheSharing.ALL)
    assert wire.read_description(wire.write_description(description)) == description
    load = ReplicaLoad("first", "f" * 64, LOAD, 2**40, None)
    assert wire.read_load(wire.write_load(load)) == load


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError([FieldViolation("a", "é"), FieldViolation("b" * 500, "c" * 5000)] * 40),
        QueueFullError("full", retry_after_s=2.5),
        LoggedError("abcd"),
        EngineStoppedError("4711"),
        *(
            kind("what was found")
            for kind in (
                ModelMismatchError,
                UnavailableError,
                ReplicaLostError,
                UnsupportedError,
                CancelledError,
                NonFiniteLogitsError,
                ResourceError,
                ProviderError,
                LibraryPanicError,
            )
        ),
    ],
)
def test_an_error_comes_out_as_it_was(error):
    found = read_error(write_error(error, method="generate"))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))


def test_what_is_no_error_of_ours_is_logged_and_crosses_by_its_id_alone(caplog):
    found = read_error(write_error(ValueError("a secret"), method="generate"))
    assert type(found) is LoggedError
    assert "secret" not in str(found)
    assert found.error_id in caplog.text
    assert "a secret" in caplog.text


@pytest.mark.parametrize("raw", [b"\xff\xff", b"", b"\x08\x05"])
def test_what_no_version_knows_is_an_error_all_the_same(raw):
    assert isinstance(read_error(raw), WorkerError)


def test_a_lone_surrogate_breaks_no_status():
    assert "\\ud800" in str(read_error(write_error(UnavailableError("\ud800"), method="generate")))
