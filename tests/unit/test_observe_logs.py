"""Log lines: one object each, secrets taken out, no line forged, no prompt told."""

from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import pytest

from llorch_serve.errors import InvalidRequestError
from llorch_serve.observe.logs import JsonFormatter, LogFormat, LogLevel, TextFormatter, set_up_logging
from llorch_serve.observe.narration import Narrator
from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.requests import ChatMessage, ChatPrompt, GenerationRequest, ScoreRequest, TextPrompt
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.terminal.serving_fronts import open_fronts
from llorch_serve.worker.local import stream
from support.fakes.generator import FakeGenerator
from support.harness.http import running_front, send

CANARY = "xylophone-canary"
TOKEN = "s3cr3t-t0ken"


@pytest.fixture(autouse=True)
def _root_as_before():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize("style", list(LogFormat))
def test_prompts_and_secrets_are_in_no_line(style, capsys):
    set_up_logging(style, LogLevel.DEBUG, [TOKEN])
    narrator = Narrator("w1")
    generator = ObservedGenerator(FakeGenerator(), [narrator])
    prompts = (TextPrompt(CANARY), ChatPrompt((ChatMessage("user", CANARY),)))
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=2, stop=(CANARY,))
        list(stream(generator, GenerationRequest(f"r{index}", prompt, sampling, correlation_id="c-1")))
    bad = SamplingParams(stop=(CANARY * 100,))
    with pytest.raises(InvalidRequestError):
        list(stream(generator, GenerationRequest("bad", TextPrompt(CANARY), bad)))
    scores = ScoreRequest("scored", TextPrompt(CANARY), (TextPrompt(CANARY),))
    generator.submit_score(scores, SimpleNamespace(deliver=lambda updates: None))
    generator.close()
    logging.getLogger("a").warning("called with Authorization: Bearer %s and %s", TOKEN, TOKEN)
    logging.getLogger("a").warning("header Bearer %s", "another-token")
    text = capsys.readouterr().err
    assert "r0" in text
    assert "scored" in text
    assert CANARY not in text
    assert TOKEN not in text
    assert "another-token" not in text


def test_http_bodies_and_tokens_are_in_no_line(capsys):
    set_up_logging(LogFormat.JSON, LogLevel.DEBUG, [TOKEN])
    generator = ObservedGenerator(FakeGenerator(), [Narrator("w1")])
    with running_front(generator, token=TOKEN) as front:
        for given in (TOKEN, TOKEN + "x"):
            for body in ({"prompt": CANARY, "max_tokens": 1}, {"prompt": [CANARY], CANARY: 1}, {"prompt": 1}):
                send(front.port, "POST", "/v1/completions", body, {"Authorization": f"Bearer {given}"})
    generator.close()
    assert [a.status for a in front.answered] == [200, 400, 400, 401, 401, 401]
    text = capsys.readouterr().err
    assert CANARY not in text
    assert TOKEN not in text


def test_an_event_has_the_narrations_fields(capsys):
    set_up_logging(LogFormat.JSON, LogLevel.INFO)
    generator = ObservedGenerator(FakeGenerator(), [Narrator("w1")])
    sampling = SamplingParams(max_tokens=2)
    list(stream(generator, GenerationRequest("r1", TextPrompt("Hello"), sampling, correlation_id="c-1")))
    generator.close()
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    expected = {
        "level": "info",
        "actor": "worker",
        "action": "inference.complete",
        "target": "r1",
        "worker_id": "w1",
        "job_id": "r1",
        "correlation_id": "c-1",
        "finish_reason": "length",
        "tokens_in": 5,
        "tokens_cached": 0,
        "tokens_out": 2,
        "queue_ms": 250.0,
    }
    assert {key: event[key] for key in expected} == expected
    assert event["duration_ms"] >= event["first_token_ms"] >= 0
    assert "5 prompt tokens" in event["human"]


def test_an_event_of_scores_has_them_too(capsys):
    set_up_logging(LogFormat.JSON, LogLevel.INFO)
    generator = ObservedGenerator(FakeGenerator(), [Narrator("w1")])
    continuations = (TextPrompt("abc"), TextPrompt("d"))
    request = ScoreRequest("s1", TextPrompt("Hello"), continuations, correlation_id="c-1")
    generator.submit_score(request, SimpleNamespace(deliver=lambda updates: None))
    generator.close()
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    expected = {
        "level": "info",
        "action": "inference.complete",
        "target": "s1",
        "job_id": "s1",
        "correlation_id": "c-1",
        "finish_reason": "score",
        "continuations": 2,
        "tokens_in": 5 + 3 + 1,
        "tokens_cached": 0,
        "tokens_out": 0,
        "queue_ms": 250.0,
    }
    assert {key: event[key] for key in expected} == expected
    assert event["duration_ms"] >= 0
    assert "9 tokens (0 cached), 2 continuations scored" in event["human"]


def record(message, **attributes):
    made = logging.LogRecord("a", logging.WARNING, "", 0, message, None, None)
    made.__dict__ |= attributes
    return made


def test_what_a_line_tells_of_has_been_counted():
    fronts = open_fronts("0", None)
    generator = fronts.observe(FakeGenerator())
    assert generator._observers[-1] is fronts.narrator
    generator.close()


def test_a_message_stays_on_its_line():
    forged = record("path /a\n2026-01-01 ERROR forged\x1b[31m")
    assert len(TextFormatter().format(forged).splitlines()) == 1
    assert "\x1b" not in TextFormatter().format(forged)
    assert json.loads(JsonFormatter().format(forged))["human"] == forged.msg


def test_no_line_ends_or_controls_of_other_alphabets_stay_in_text():
    shown = TextFormatter().format(record("a\x9b2J\x85b\u2028c\u2029d"))
    assert shown.endswith("a\\x9b2J\\x85b\\u2028c\\u2029d")


@pytest.mark.parametrize("secret", ['quo"ted', "back\\slash", 'both\\"'])
@pytest.mark.parametrize("formatter", [JsonFormatter, TextFormatter])
def test_a_secret_is_taken_out_however_it_is_written(formatter, secret):
    line = formatter((secret,)).format(record(f"found {secret} here"))
    assert "found [redacted] here" in line


def test_a_traceback_is_kept():
    try:
        raise ValueError("inside")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    assert "ValueError: inside" in json.loads(JsonFormatter().format(made))["traceback"]
    assert "ValueError: inside" in TextFormatter().format(made)
