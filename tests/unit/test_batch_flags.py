"""What ``llorch batch`` makes of its flags, and what it says of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llorch_serve.batch.plan import Counts
from llorch_serve.batch.summary import Summary
from llorch_serve.http.fields import read_struct
from llorch_serve.http.openai_schema import ChatBody, CompletionBody
from llorch_serve.terminal.batch_flags import bare_settings
from llorch_serve.terminal.batch_output import describe_rate, duration, show_counts, show_summary
from llorch_serve.terminal.sampling_flags import SamplingFlags

EVERY = SamplingFlags(
    min_tokens=1,
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    typical_p=0.8,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    repeat_last_n=4,
    logit_bias=["7=-5"],
    seed=9,
    stop=["x"],
    stop_token_id=[2],
    ignore_eos=True,
)


def test_flags_that_are_not_given_are_no_settings():
    assert bare_settings(SamplingFlags(), 256) == {"max_tokens": 256}


@pytest.mark.parametrize(("kind", "more"), [(CompletionBody, {"prompt": "a"}), (ChatBody, {"messages": []})])
def test_every_flag_is_a_field_of_a_body(kind, more):
    settings = bare_settings(EVERY, 8)
    body = read_struct(json.dumps(settings | more).encode(), kind)  # which refuses what it does not know
    assert settings == {name: getattr(body, name) for name in settings}
    assert len(settings) == 16
    assert settings["logit_bias"] == {"7": -5.0}


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (59.97, "1:00"), (60, "1:00"), (245, "4:05"), (3723, "1:02:03")],
)
def test_durations(seconds, told):
    assert duration(seconds) == told


RUN = Summary(
    lines=10,
    answered=6,
    failed=1,
    answered_before=2,
    prompt_tokens=1000,
    completion_tokens=500,
    cached_tokens=300,
    tokens_planned=800,
    tokens_done=400,
    seconds=2.0,
)


def test_a_rate_is_of_this_run():
    assert describe_rate(RUN) == "1 failed, 2.5 lines/s, 750 tokens/s, 2.0 s left"
    assert describe_rate(Summary(lines=3)) == ""


def test_the_end_is_told_to_people_and_to_programs(capsys):
    errors = Path("out.jsonl.errors.jsonl")
    show_summary(RUN, Path("out.jsonl"), errors, as_json=False)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "5 of 10 lines done in 2.0 s, 2 before (1 failed, 2.5 lines/s, 750 tokens/s); 1000 tokens of "
        "prompts, 300 of them not computed again, 500 of answers: out.jsonl\n"
    )
    show_summary(RUN, Path("out.jsonl"), errors, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["answered"], document["errors"], document["cached_tokens"]) == (6, str(errors), 300)
    show_summary(replace(RUN, failed=0), Path("out.jsonl"), errors, as_json=True)
    assert json.loads(capsys.readouterr().out)["errors"] is None


def test_counts_are_told(capsys):
    show_counts(Counts(lines=3, bad=1, bare=2, tokens=90), as_json=False)
    assert capsys.readouterr().err == (
        "3 lines, 2 of them bare prompts or chats, about 90 tokens with their answers\n"
    )
