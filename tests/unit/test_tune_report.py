"""What a search says: the speeds that count, the table, the evidence of a recipe and its limit."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace

import pytest

from llorch_export.recipes.file import load_recipe, parse_recipe
from llorch_export.recipes.written import recipe_text
from llorch_export.tune.candidates import Candidate
from llorch_export.tune.choice import Standings
from llorch_export.tune.report import TuneReport, evidence, marks, table, tried
from llorch_export.tune.scenarios import scenarios
from llorch_export.tune.standing import Bounds, Judgement, Lap, Standing, ratio
from llorch_export.tune.tuning import kept_recipe
from llorch_serve.bench.offline import summarise
from llorch_serve.bench.schema import Entry, Problem, Row
from llorch_serve.errors import UsageError
from support.builders.bench_reports import HOST, fidelity

NAMES = ("prefill, 1 stream", "decode, 1 stream", "prefill, 8 streams", "decode, 8 streams")


def test_scenarios_are_prompts_and_answers_of_each_number_of_streams() -> None:
    work = scenarios([8, 1], 512, 2048)
    assert work.weights("balance") == dict.fromkeys(NAMES, 1.0)
    assert work.weights("answers") == dict(zip(NAMES, (1.0, 3.0, 1.0, 3.0), strict=True))
    assert work.weights("prompts") == dict(zip(NAMES, (3.0, 1.0, 3.0, 1.0), strict=True))
    # While the prompts of eight streams are taken, up to four steps each, those before them go on answering.
    assert {test.generated_tokens for test in work.tests} == {32 + 8 * 4}
    assert (work.longest, work.slots) == (512 + 64, 8)


def test_a_short_context_takes_shorter_prompts_unless_their_length_is_asked_for() -> None:
    assert scenarios([1, 2], None, 128).longest == 128
    with pytest.raises(UsageError, match="--prompt-tokens 100 with 2 streams needs a context of 134 tokens"):
        scenarios([1, 2], 100, 128)
    with pytest.raises(UsageError, match="with 200 streams needs"):
        scenarios([200], None, 128)


def test_the_objective_is_the_weighted_geometric_mean_of_ratios() -> None:
    own, other = {"a": 200.0, "b": 50.0}, {"a": 100.0, "b": 100.0}
    assert ratio(own, other, {"a": 1.0, "b": 1.0}) == pytest.approx(0.0)
    assert math.exp(ratio(own, other, {"a": 3.0, "b": 1.0})) == pytest.approx(2 ** (3 / 4) * 0.5 ** (1 / 4))


def entry(decode: float, problem: Problem | None = None) -> Entry:
    work = scenarios([1], 64, 2048)
    runs = [{"prefill_tokens_per_s": 10.0 * n, "decode_tokens_per_s": decode} for n in (1, 2)]
    row = Row(test=work.tests[0], figures={} if problem else summarise(runs), problem=problem)
    return Entry(label="a", provider="cpu", peak_rss_mib=99.0, rows=(row,))


def test_a_lap_has_the_speeds_of_each_round() -> None:
    lap = scenarios([1], 64, 2048).lap(entry(5.0))
    assert lap == Lap(
        rounds=(
            {"prefill, 1 stream": 10.0, "decode, 1 stream": 5.0},
            {"prefill, 1 stream": 20.0, "decode, 1 stream": 5.0},
        ),
        peak_mib=99.0,
    )


def test_a_lap_without_a_speed_says_why() -> None:
    work = scenarios([1], 64, 2048)
    assert (
        work.lap(entry(0.0)).problem == "some stream ended before the last one began; choose fewer --streams"
    )
    assert work.lap(entry(5.0, Problem(exit_code=4, message="too long"))).problem == "too long"


@pytest.fixture
def report() -> TuneReport:
    names = NAMES[:2]
    default = Standing(Candidate("cpu", load_recipe("cpu")), Judgement(fidelity=fidelity(0.008)))
    found = Standings(default, Bounds(0.01), dict.fromkeys(names, 1.0))
    base = Lap(rounds=(dict.fromkeys(names, 100.0),) * 4, peak_mib=500.0)
    default.add(base, base, found.weights)
    fast = Standing(Candidate("fast", load_recipe("int8")), Judgement(fidelity=fidelity(0.004)))
    fast.add(Lap(rounds=(dict.fromkeys(names, 130.0),) * 4, peak_mib=400.0), base, found.weights)
    far = Standing(Candidate("far", load_recipe("int4")), Judgement(fidelity=fidelity(0.2)))
    far.lost = found.beyond(far)
    broken = Standing(Candidate("broken", load_recipe("fp32")), Judgement(problem="expected int | null"))
    for one in (fast, far, broken):
        found.add(one)
    return TuneReport(
        source="a.gguf", complete=True, chosen="fast", default="cpu", recipe=None, artifact=None,
        command="llorch tune a.gguf", export=None, serve=None, oracle="itself", positions=64, host=HOST,
        software=("llorch 0.1.0",), max_kl=0.01, memory_mib=None, prefer="balance", seconds=9.0,
        round_noise=found.round_noise(), tried=tried(found),
    )  # fmt: skip


def test_the_table_has_the_fastest_first_and_says_why_the_others_are_not_it(report: TuneReport) -> None:
    rows = table(report).splitlines()
    assert rows[0] == (
        "| recipe | KL, nats | peak MiB | prefill, 1 stream, tokens/s | decode, 1 stream, tokens/s "
        "| to the default |  |"
    )
    assert rows[2:] == [
        "| fast | 0.004 | 400 | 130.0 | 130.0 | 1.300 ± 0.061 | **chosen**, frontier |",
        "| cpu | 0.008 | 500 | 100.0 | 100.0 | 1 |  |",
        "| far | 0.2 |  |  |  |  | KL 0.2 is beyond 0.01 |",
        "| broken |  |  |  |  |  | expected int / null |",
    ]
    assert marks(report) == [
        ("fast (400 MiB)", pytest.approx(1.3), 0.004, "chosen"),
        ("cpu (500 MiB)", 1.0, 0.008, "other recipes"),
    ]


def test_the_evidence_is_toml_with_machine_versions_command_and_figures(report: TuneReport) -> None:
    text = recipe_text(load_recipe("int8"), evidence(report, "2026-11-30T00:00:00+00:00"))
    found = tomllib.loads(text)["evidence"]
    assert found["machine"] == "A CPU, 2 of 4 CPUs with avx2, 8 GiB, Linux 6 x86_64"
    assert found["command"] == "llorch tune a.gguf"
    assert found["software"] == ["llorch 0.1.0"]
    assert found["recipes_tried"] == 4
    assert found["chosen"]["recipe"] == "fast"
    assert found["chosen"]["speed_to_default"] == pytest.approx(1.3)
    assert found["default"]["tokens_per_s"] == {"prefill, 1 stream": 100.0, "decode, 1 stream": 100.0}


def test_a_recipe_beyond_its_own_limit_gets_the_bound_that_it_was_found_within() -> None:
    cpu = Candidate("cpu", load_recipe("cpu"))
    within = Standing(cpu, Judgement(fidelity=fidelity(0.005)))
    beyond = Standing(cpu, Judgement(fidelity=fidelity(0.02, passed=False)))
    assert kept_recipe(within, Bounds(0.05), HOST).defaults == cpu.recipe.defaults
    limit = replace(cpu.recipe.defaults, kl_limit=0.05)
    kept = kept_recipe(beyond, Bounds(0.05), HOST)
    assert kept.defaults == limit
    assert parse_recipe(recipe_text(kept).encode(), origin="kept").defaults == limit
