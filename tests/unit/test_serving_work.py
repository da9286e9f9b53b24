"""What requests under load ask, and the flags that say so."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from llorch_serve.bench.serving.work import (
    MAX_FILE_BYTES,
    Job,
    Lengths,
    drawn_jobs,
    listed_jobs,
    read_dataset,
)
from llorch_serve.errors import UsageError
from llorch_serve.requests import ChatMessage, ChatPrompt, TextPrompt, TokenPrompt
from llorch_serve.terminal.bench_flags import LengthFlags
from llorch_serve.terminal.load_flags import LoadFlags
from llorch_serve.terminal.load_plan import plan_load

IDS = tuple(range(100, 200))


def prompts(jobs: Sequence[Job]) -> list[tuple[int, ...]]:
    return [job.prompt.token_ids for job in jobs if isinstance(job.prompt, TokenPrompt)]


def drawn(count: int, spread: float, seed: int = 0, vocab: int = 50) -> list[Job]:
    around = Lengths.around(40, spread), Lengths.around(10, spread)
    return list(itertools.islice(drawn_jobs(*around, IDS, vocab, seed), count))


def test_fixed_lengths():
    jobs = drawn(20, 0)
    assert {len(prompt) for prompt in prompts(jobs)} == {40}
    assert {prompt[1:] for prompt in prompts(jobs)} == {IDS[1:40]}
    assert {job.max_tokens for job in jobs} == {10}


def test_no_request_starts_from_the_prefix_of_another():
    assert {prompt[0] for prompt in prompts(drawn(50, 0))} == set(range(50))


def test_drawn_lengths_fill_their_range():
    jobs = drawn(2000, 0.5)
    assert {len(prompt) for prompt in prompts(jobs)} == set(range(20, 61))
    assert {job.max_tokens for job in jobs} == set(range(5, 16))


def test_the_seed_decides_the_lengths():
    def lengths(seed: int) -> list[tuple[int, int]]:
        jobs = drawn(50, 0.5, seed)
        return [(len(prompt), job.max_tokens) for prompt, job in zip(prompts(jobs), jobs, strict=True)]

    assert lengths(1) == lengths(1) != lengths(2)


@pytest.mark.parametrize(
    ("middle", "spread", "found"),
    [(512, 0.5, (256, 768)), (10, 0.25, (8, 12)), (1, 0.9, (1, 1)), (2, 0.99, (1, 3)), (7, 0.0, (7, 7))],
)
def test_whole_numbers_within_the_spread(middle: int, spread: float, found: tuple[int, int]):
    assert Lengths.around(middle, spread) == Lengths(*found)


def test_a_file_of_prompts(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "Once\\u2028upon"}\n\n{"prompt": [5, 6], "max_tokens": 3}\r\n'
        '{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}'
    )
    dataset = read_dataset(path)
    assert list(itertools.islice(listed_jobs(dataset, 64), 4)) == [
        Job(TextPrompt("Once\u2028upon"), 64),
        Job(TokenPrompt((5, 6)), 3),
        Job(ChatPrompt((ChatMessage("user", "Hi"),)), 9),
        Job(TextPrompt("Once\u2028upon"), 64),
    ]
    name, digest = dataset.name.split()
    assert (name, len(digest)) == ("prompts.jsonl", 12)
    path.write_text('{"prompt": "Other"}')
    assert read_dataset(path).name != dataset.name


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("[]", "array"),
        ("{", "truncated"),
        ("{}", "either prompt or messages"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "either prompt or messages"),
        ('{"prompt": ""}', "empty"),
        ('{"prompt": []}', "empty"),
        ('{"messages": []}', "empty"),
        ('{"prompt": [1.5]}', "int"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "a", "max_token": 1}', "max_token"),
        ('{"prompt": "\\ud800"}', "expected an object"),
        ("\udcff", "malformed"),
    ],
)
def test_other_lines_are_refused_by_their_number(tmp_path: Path, line: str, named: str):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=r"prompts\.jsonl:2") as caught:
        read_dataset(path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_absent_empty_and_huge_files_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_dataset(tmp_path / "absent")
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(UsageError, match="no prompt"):
        read_dataset(empty)
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(UsageError, match=str(MAX_FILE_BYTES)):
        read_dataset(huge)


NO_LENGTHS = LengthFlags(prompt_tokens=None, prompt_ids=None, max_tokens=64)


def plan(flags: LoadFlags, lengths: LengthFlags = NO_LENGTHS, *, http: bool = False):
    dataset = None if flags.dataset is None else flags.dataset.name
    tokens = None if flags.dataset is not None else 512
    return plan_load(flags, lengths, prompt_tokens=tokens, dataset=dataset, http=http)


def test_a_closed_loop_for_each_number_of_clients():
    one, eight = plan(LoadFlags(concurrency="1,8"))
    assert (one.arrivals, one.concurrency, eight.concurrency) == ("closed", 1, 8)
    assert (one.requests, one.duration_s, one.prompt_tokens, one.generated_tokens) == (100, None, 512, 64)
    assert (one.rate_per_s, one.burstiness, one.seed, one.limits_ms, one.http) == (
        None,
        None,
        None,
        {},
        False,
    )


def test_an_open_loop_for_each_rate():
    slow, fast = plan(
        LoadFlags(
            request_rate="0.5,4",
            duration=20.0,
            slo=(
                "ttft:200",
                "tpot:50.5",
            ),
            spread=0.25,
            seed=7,
        )
    )
    assert (slow.arrivals, slow.rate_per_s, fast.rate_per_s) == ("open", 0.5, 4.0)
    assert (slow.requests, slow.duration_s, slow.burstiness, slow.seed) == (None, 20.0, 1.0, 7)
    assert (slow.limits_ms, slow.spread, slow.concurrency) == ({"ttft": 200.0, "tpot": 50.5}, 0.25, None)
    assert plan(LoadFlags(request_rate="1", burstiness=0.5))[0].burstiness == 0.5
    assert plan(LoadFlags(request_rate="1"))[0].seed == 0


def test_a_datasets_name_stands_for_its_prompts():
    (test,) = plan(LoadFlags(concurrency="1", dataset=Path("p.jsonl"), requests=7))
    assert (test.dataset, test.prompt_tokens, test.requests) == ("p.jsonl", None, 7)


def test_prompts_that_are_drawn_have_a_seed():
    assert plan(LoadFlags(concurrency="1"), http=True)[0].seed == 0
    assert plan(LoadFlags(concurrency="1", seed=3), http=True)[0].seed == 3
    assert plan(LoadFlags(concurrency="1", dataset=Path("p.jsonl")), http=True)[0].seed is None


IDS_GIVEN = LengthFlags(prompt_tokens=None, prompt_ids="ids.json", max_tokens=64)


@pytest.mark.parametrize(
    ("flags", "lengths", "named"),
    [
        (LoadFlags(concurrency="1", request_rate="1"), NO_LENGTHS, "one after the other"),
        (LoadFlags(slo=("ttft:1",)), NO_LENGTHS, "--slo has no effect without"),
        (LoadFlags(requests=5), NO_LENGTHS, "--requests has no effect without"),
        (LoadFlags(concurrency="1", requests=5, duration=1.0), NO_LENGTHS, "both end a run"),
        (LoadFlags(concurrency="1", burstiness=2.0), NO_LENGTHS, "--burstiness has no effect"),
        (LoadFlags(request_rate="1", burstiness=0.0), NO_LENGTHS, "--burstiness is 0"),
        (LoadFlags(request_rate="1", burstiness=float("nan")), NO_LENGTHS, "--burstiness is nan"),
        (LoadFlags(concurrency="1", seed=1), NO_LENGTHS, "--seed has no effect"),
        (LoadFlags(concurrency="1", seed=1), IDS_GIVEN, "--seed has no effect"),
        (LoadFlags(concurrency="1", spread=1.0), NO_LENGTHS, "--spread is 1"),
        (LoadFlags(concurrency="1", spread=-0.1), NO_LENGTHS, "--spread is -0.1"),
        (LoadFlags(concurrency="1", spread=0.1), IDS_GIVEN, "--spread does not go with --prompt-ids"),
        (LoadFlags(concurrency="1", duration=0.0), NO_LENGTHS, "--duration is 0"),
        (LoadFlags(concurrency="1", duration=float("inf")), NO_LENGTHS, "--duration is inf"),
        (LoadFlags(concurrency="1,x"), NO_LENGTHS, "--concurrency is '1,x'"),
        (LoadFlags(concurrency="0"), NO_LENGTHS, "--concurrency is '0'"),
        (LoadFlags(concurrency="1.5"), NO_LENGTHS, "whole numbers"),
        (LoadFlags(concurrency="2,2"), NO_LENGTHS, "another one"),
        (LoadFlags(request_rate="nan"), NO_LENGTHS, "--request-rate is 'nan'"),
        (LoadFlags(request_rate="inf"), NO_LENGTHS, "--request-rate is 'inf'"),
        (LoadFlags(concurrency="1", slo=("itl:5",)), NO_LENGTHS, "--slo is 'itl:5'"),
        (LoadFlags(concurrency="1", slo=("ttft",)), NO_LENGTHS, "--slo is 'ttft'"),
        (LoadFlags(concurrency="1", slo=("ttft:0",)), NO_LENGTHS, "--slo is 'ttft:0'"),
        (LoadFlags(concurrency="1", slo=("ttft:nan",)), NO_LENGTHS, "--slo is 'ttft:nan'"),
        (
            LoadFlags(
                concurrency="1",
                slo=(
                    "ttft:1",
                    "ttft:2",
                ),
            ),
            NO_LENGTHS,
            "two limits",
        ),
        (
            LoadFlags(concurrency="1", dataset=Path("p")),
            IDS_GIVEN,
            "--prompt-ids has no effect with --dataset",
        ),
        (
            LoadFlags(concurrency="1", dataset=Path("p")),
            LengthFlags(5, None, 64),
            "--prompt-tokens has no effect with --dataset",
        ),
        (LoadFlags(concurrency="1", dataset=Path("p"), spread=0.1), NO_LENGTHS, "--spread has no effect"),
    ],
)
def test_flags_that_say_nothing_together_are_refused(flags: LoadFlags, lengths: LengthFlags, named: str):
    with pytest.raises(UsageError) as caught:
        plan(flags, lengths)
    assert named in str(caught.value)
