"""``llorch generate`` with several answers and prompt log-probabilities, and ``llorch score``, here and from
a worker.
"""

from __future__ import annotations

import pytest

from support.harness.processes import llorch_here

PROMPT = ("--prompt", "Paris is the capital")
DRAWN = ("--temperature", "1", "--seed", "5", "--max-tokens", "6", "--ignore-eos")


@pytest.fixture(params=["here", "worker"])
def where(request, tiny, tiny_worker):
    return (tiny,) if request.param == "here" else ("--connect", tiny_worker.address)


def test_several_answers_are_one_document(where):
    document = llorch_here("generate", *where, *PROMPT, *DRAWN, "--n", "3", "--json").document()
    one = llorch_here("generate", *where, *PROMPT, *DRAWN, "--json").document()
    answers = document["answers"]
    assert len(answers) == 3
    assert answers[0]["token_ids"] == one["token_ids"]
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 3
    assert [bool(answer["prompt_tokens"]) for answer in answers] == [True, False, False]


def test_several_answers_as_text_are_numbered(where):
    outcome = llorch_here("generate", *where, *PROMPT, *DRAWN, "--n", "2")
    document = llorch_here("generate", *where, *PROMPT, *DRAWN, "--n", "2", "--json").document()
    assert outcome.stdout == "".join(f"[{i}] {a['text']}\n" for i, a in enumerate(document["answers"]))
    assert outcome.stderr.count("ended after 6 tokens") == 2


def test_the_best_of_several_is_shown(where):
    best = llorch_here("generate", *where, *PROMPT, *DRAWN, "--best-of", "4", "--json").document()
    several = llorch_here(
        "generate", *where, *PROMPT, *DRAWN, "--n", "4", "--logprobs", "0", "--json"
    ).document()

    def mean(answer):
        return sum(place["logprob"] for place in answer["logprobs"]) / len(answer["logprobs"])

    assert best["token_ids"] == max(several["answers"], key=mean)["token_ids"]


def test_a_prompt_is_echoed_and_its_tokens_scored(where):
    flags = ("--echo", "--prompt-logprobs", "1", "--max-tokens", "2", "--temperature", "0", "--json")
    document = llorch_here("generate", *where, *PROMPT, *flags).document()
    assert document["text"].startswith(PROMPT[1])
    assert len(document["prompt_logprobs"]) == document["prompt_tokens"] - 1
    score = llorch_here("score", *where, "--continuation", PROMPT[1], "--json").document()["scores"][0]
    # The tokenizer puts BOS before the prompt, and the score's context is BOS too.
    assert score["logprob"] == pytest.approx(sum(p["logprob"] for p in document["prompt_logprobs"]), abs=1e-3)


def test_scores_are_lines_or_a_document(where):
    flags = ("--context", "Paris is the", "--continuation", " capital", "--continuation", " of")
    document = llorch_here("score", *where, *flags, "--logprobs", "2", "--json").document()
    first, second = document["scores"]
    assert (first["continuation"], second["continuation"]) == (" capital", " of")
    assert first["logprob"] == pytest.approx(sum(place["logprob"] for place in first["logprobs"]))
    assert [len(place["top"]) for place in first["logprobs"]] == [2] * first["token_count"]
    lines = llorch_here("score", *where, *flags).stdout.splitlines()
    assert [float(line.split()[0]) for line in lines] == pytest.approx(
        [first["logprob"], second["logprob"]], abs=1e-3
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", *PROMPT, "--n", "0"), "sampling.n: found 0"),
        (("generate", *PROMPT, "--n", "3", "--best-of", "2"), "sampling.best_of: found 2"),
        (("generate", *PROMPT, "--prompt-logprobs", "3"), "--prompt-logprobs shows in the JSON"),
        (("score", "--continuation", ""), "continuations[0]: found no tokens"),
        (("score", "--continuation", "a", "--logprobs", "21", "--json"), "logprobs: found 21"),
        (("score", "--continuation", "a", "--logprobs", "2"), "--logprobs shows in the JSON"),
    ],
)
def test_what_cannot_be_is_a_usage_error(where, arguments, says):
    outcome = llorch_here(*arguments, *where)
    assert outcome.code == 2
    assert says in outcome.error()
