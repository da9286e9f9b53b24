"""JSON Schema on the real model behind gRPC: every answer parses and validates, and neighbours notice
nothing.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import ChatMessage, ChatPrompt, GenerationRequest
from llorch_serve.sampling.params import SamplingParams
from llorch_serve.structured.spec import JsonSchema

pytestmark = pytest.mark.real_model
pytest.importorskip("llguidance")

SLOTS = 16


def record(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD = {"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"}
SCHEMAS = {
    "person": record(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "choice": {"enum": ["north", "south", "east", "west", 4, None, True]},
    "weather": record(
        city=WORD,
        celsius={"type": "number", "minimum": -40, "maximum": 50},
        sky={"enum": ["clear", "cloudy", "rain"]},
    ),
    "list": {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 99},
        "minItems": 2,
        "maxItems": 4,
    },
    "event": record(day={"type": "string", "format": "date"}, open={"type": "boolean"}),
    "nested": record(
        to=record(street=WORD, number={"type": "integer", "minimum": 1, "maximum": 999}),
        gift={"type": ["boolean", "null"]},
    ),
    "either": {"anyOf": [record(yes={"const": True}), record(no=WORD)]},
    "tree": {
        "$defs": {"leaf": record(value={"type": "integer", "minimum": 0, "maximum": 9})},
        **record(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
    },
}
QUESTIONS = ("Describe someone you know.", "Invent an entry.", "Answer in JSON.", "What is it like today?")


def ask(client, name, question, **sampling):
    params = SamplingParams(**{"temperature": 1, "max_tokens": 400, **sampling})
    updates = list(
        client.generate(GenerationRequest(name, ChatPrompt((ChatMessage("user", question),)), params))
    )
    ids = [token for update in updates for token in update.token_ids]
    return "".join(update.text for update in updates), ids, updates[-1].completion


@pytest.fixture(scope="module")
def client(smollm2_worker):
    # A prompt whose prefix is cached reads it rounded to int8, and ids are compared exactly here.
    flags = ("--slots", str(SLOTS), "--no-prefix-cache")
    with WorkerClient(smollm2_worker("int8", *flags).address) as made:
        yield made


def check(client, count):
    """Send ``count`` requests with forms and, among them, one without for every eight; check them all."""
    draw = random.Random(count)
    free = {
        f"free-{index}": (
            draw.choice(QUESTIONS),
            {"seed": draw.getrandbits(63), "max_tokens": 24, "ignore_eos": True},
        )
        for index in range(count // 8)
    }
    alone = {name: ask(client, name, question, **sampling)[1] for name, (question, sampling) in free.items()}
    kinds = [list(SCHEMAS)[index % len(SCHEMAS)] for index in range(count)]
    with ThreadPoolExecutor(SLOTS) as pool:
        held = []
        beside = {}
        for index, kind in enumerate(kinds):
            form = JsonSchema(json.dumps(SCHEMAS[kind]))
            seed = draw.getrandbits(63)
            temperature = draw.choice((0.0, 0.7, 1.0, 1.3))
            job = pool.submit(
                ask,
                client,
                f"held-{index}",
                draw.choice(QUESTIONS),
                structured=form,
                seed=seed,
                temperature=temperature,
            )
            held.append((kind, job))
            if index % 8 == 7:
                name = f"free-{index // 8}"
                beside[name] = pool.submit(ask, client, name, free[name][0], **free[name][1])
    answers = [(kind, *job.result()) for kind, job in held]
    for kind, text, _, completion in answers:
        assert completion.reason is FinishReason.STOP, (kind, text)
        jsonschema.validate(
            json.loads(text),
            SCHEMAS[kind],
            cls=jsonschema.Draft202012Validator,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
    assert {name: job.result()[1] for name, job in beside.items()} == alone
    # The model had a say: answers to one schema differ.
    assert len({text for _, text, _, _ in answers}) > count // 4


def test_answers_validate_and_neighbours_are_as_alone(client):
    check(client, 40)


@pytest.mark.slow
def test_two_hundred_answers_validate(client):
    check(client, 200)


def test_the_same_seed_gives_the_same_answer(client):
    form = JsonSchema(json.dumps(SCHEMAS["weather"]))
    first, again = (ask(client, f"r{i}", QUESTIONS[3], structured=form, seed=11) for i in range(2))
    assert first[:2] == again[:2]
