"""From measurements to ratios, verdicts, the page and the picture of ``ci/bench``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from bench_peers.asked import DEMANDS, TIE, verdicts
from bench_peers.machine import cpu_fields, this_machine
from bench_peers.markdown import COMMAND, markers, one_run, replace_kind, replace_section, show_ratio, table
from bench_peers.models import PeersFolder
from bench_peers.ours import DEFAULT, FAITHFUL, SMALLEST, all_recipes
from bench_peers.peers import GENAI, LLAMA_CPP, OPENVINO, all_peers, compare
from bench_peers.results import (
    DECODE,
    PREFILL,
    Ratio,
    Run,
    fastest,
    peak_mib,
    ratio,
    series,
)
from bench_peers.reuse import PROMPTS, Tie
from bench_peers.rounds import alternated
from bench_peers.turns import order
from llorch_serve.errors import ArtifactError, UsageError
from support.builders.bench_runs import KL, OURS, gains, run

BEGIN, END = markers("ci/bench")


def test_a_ratio_is_of_medians_and_its_spread_of_rounds():
    found = ratio([100.0, 130.0, 120.0], [100.0, 100.0, 80.0])
    assert found == Ratio(1.2, 1.0, 1.5)
    assert show_ratio(found) == "1.20 (1.00 to 1.50)"


def test_drift_of_the_machine_does_not_move_a_ratio():
    found = ratio(series(run(), DEFAULT, DECODE[0]), series(run(), LLAMA_CPP, DECODE[0]))
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_figures_are_picked_by_streams_and_kind():
    one = run()
    assert series(one, DEFAULT, PREFILL) == (1000.0, 500.0, 1100.0)
    assert series(one, OPENVINO, DECODE[2]) == pytest.approx((2880, 1440, 3168))
    assert series(one, GENAI, DECODE[1]) == ()
    assert peak_mib(one, OPENVINO) == 3200.0
    assert peak_mib(one, GENAI) == 100.0
    best = fastest(one, one.of(ours=False), DECODE[0])
    assert best is not None
    assert best.label == GENAI
    assert fastest(one, [subject for subject in one.subjects if subject.label == GENAI], DECODE[1]) is None


def test_every_demand_meets_its_fastest_peer_and_the_recipes_it_allows():
    rows = {(row.figure, row.condition): row for row in verdicts(run())}
    assert len(rows) == len(DEMANDS) + len(PROMPTS) + 1
    close = rows["decode, 1 stream", "KL <= 0.01"]
    assert close.compared == f"{DEFAULT} (KL 0.004) to {GENAI} (KL 0.33)"
    assert close.found is not None
    assert close.found.value == pytest.approx(1.2)
    assert not close.holds  # 1.25 is asked for
    small = rows["decode, 1 stream", f"{SMALLEST}, any KL"]
    assert small.found is not None
    assert small.found.value == pytest.approx(1.6)
    assert small.holds
    many = rows["decode, 32 streams", "KL <= 0.05"]
    assert many.compared.endswith(f"to {OPENVINO} (KL 0.3)")
    assert many.found is not None
    assert many.found.value == pytest.approx(120 / 90)
    assert many.holds


def test_what_is_as_near_as_llama_cpp_is_held_against_it_alone():
    rows = {row.figure: row for row in verdicts(run()) if row.condition == "KL <= 0.0027"}
    compared = f"{FAITHFUL} (KL 0.0027) to {LLAMA_CPP} (KL 0.0026)"
    assert {figure: (row.asked, row.compared, row.holds) for figure, row in rows.items()} == {
        "decode, 1 stream": (">= 1.2", compared, True),
        "prefill, 1 stream": (">= 3", compared, False),
        "decode, 8 streams": (">= 2", compared, False),
    }


def test_a_recipe_that_diverges_too_much_does_not_count():
    far = [replace_struct(subject, kl=0.02) if subject.ours else subject for subject in run().subjects]
    rows = [row for row in verdicts(run(subjects=far)) if row.condition in ("KL <= 0.0027", "KL <= 0.01")]
    assert len(rows) == 7
    assert {(row.compared, row.found, row.holds) for row in rows} == {("no recipe of ours", None, False)}
    near = [row for row in verdicts(run(subjects=far)) if row.condition == "KL <= 0.05"]
    assert near
    assert all(row.found is not None for row in near)


def replace_struct(value, **changes):
    return msgspec.structs.replace(value, **changes)


@pytest.mark.parametrize(("gap", "holds"), [(TIE / 2, True), (TIE * 2, False)])
def test_answers_may_part_at_a_tie_alone(gap, holds):
    odd = gains(summary=Tie(17, gap))
    edit, summary = verdicts(run(gains=[gains(), odd, gains()]))[-3:-1]
    assert edit.holds
    assert edit.note == "45 of 60 guesses right; same ids"
    assert summary.holds is holds
    assert f"part at token 17, where two logits are {gap:.2g} apart" in summary.note


def test_a_second_request_is_judged_by_its_time_to_the_first_token():
    last = verdicts(run())[-1]
    assert last.found is not None
    assert last.found.value == pytest.approx(0.05)
    assert last.holds
    slow = replace_struct(gains(), second_ttft_ms=90.0)
    assert not verdicts(run(gains=[slow] * 3))[-1].holds


def test_the_section_is_replaced_and_the_rest_stays():
    page = f"# Title\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n"
    again = replace_section(replace_section(page, "first"), "second\n")
    assert again == f"# Title\n\n{BEGIN}\n\nsecond\n\n{END}\n\nafter\n"


def test_each_script_has_a_section_of_its_own():
    begin, end = markers("ci/bench-1b")
    page = f"{BEGIN}\nmine\n{END}\n{begin}\nold\n{end}\n"
    assert (
        replace_section(page, "new", by="ci/bench-1b") == f"{BEGIN}\nmine\n{END}\n{begin}\n\nnew\n\n{end}\n"
    )


@pytest.mark.parametrize("page", ["none", f"{BEGIN} alone", f"{END} {BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_page_without_its_markers_is_refused(page):
    with pytest.raises(UsageError, match="once, in this order"):
        replace_section(page, "x")


def test_other_kinds_of_machine_keep_their_figures():
    begin, end = markers("ci/bench-1b")
    page = f"# Title\n\n{begin}\n{end}\n\n### after\n"
    for kind, text in (
        ("Intel", "a | b"),
        ("AMD", "first\n"),
        ("Intel", "c"),
        ("AMD", "second\n\n#### x"),
        ("Intel", "d"),
    ):
        page = replace_kind(page, kind, text, by="ci/bench-1b")
    figures = "### AMD\n\nsecond\n\n#### x\n\n### Intel\n\nd"
    assert page == f"# Title\n\n{begin}\n\n{figures}\n\n{end}\n\n### after\n"
    with pytest.raises(UsageError, match="under a heading of their kind"):
        replace_kind(f"{begin}\nan older figure\n{end}", "AMD", "new", by="ci/bench-1b")
    with pytest.raises(UsageError, match="once, in this order"):
        replace_kind("none", "AMD", "new", by="ci/bench-1b")


@pytest.mark.parametrize("by", ["ci/bench-1b", "ci/bench-gemma3", "ci/bench-experts"])
def test_the_page_takes_figures_of_another_kind_of_machine(by):
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    added = replace_kind(page, "Z", "new", by=by)
    assert added.replace("### Z\n\nnew\n\n", "") == page


def test_the_section_holds_every_engine_and_what_it_was_asked():
    text = one_run(run(), "picture.png")
    assert "![Speed against divergence](picture.png)" in text
    assert "A CPU, 2 cores with avx2, 16 GiB" in text
    assert f"| **{DEFAULT}** | 0.004 | 90.0% | 1000.0 | 120.0 | 960.0 | 3840.0 | 3200 |  |" in text
    assert f"| {GENAI} | 0.33 | 90.0% | 1000.0 | 100.0 |  |  | 100 |  |" in text
    assert (
        f"| **{DEFAULT}**: decode, 1 stream | 1.50 (1.50 to 1.50) | 1.20 (1.20 to 1.20) | 1.33 (1.33 to "
        f"1.33) |" in text
    )
    assert text.count("| yes |") + text.count("| **no** |") == len(verdicts(run()))
    assert BEGIN not in text


def test_the_time_of_a_command_to_its_first_token_stands_beside_the_speeds():
    starts = [{label: (0.5 if label == LLAMA_CPP else 1.0) * drift for label in KL} for drift in (1, 3, 1.1)]
    text = one_run(run(first_token_s=starts), "picture.png")
    assert f"| peak MiB | {COMMAND} |" in text
    assert f"| {LLAMA_CPP} | 0.0026 | 90.0% | 1000.0 | 80.0 | 640.0 | 2560.0 | 3200 | 0.55 |" in text
    assert f"| **{DEFAULT}**: {COMMAND} | 2.00 (2.00 to 2.00) | 1.00 (1.00 to 1.00) |" in text
    assert text.count(f"**: {COMMAND} |") == len(OURS)
    assert f"**: {COMMAND} |" not in one_run(run(), "picture.png")


def test_a_bar_in_a_cell_stays_in_its_cell():
    assert table(("a",), [("x|y",)]) == "| a |\n| --- |\n| x\\|y |"


def test_turns_alternate_and_every_other_round_runs_backwards():
    everyone = alternated(["a", "b", "c"], ["x", "y"])
    assert everyone == order(everyone, 0) == order(everyone, 2) == ["a", "x", "b", "y", "c"]
    assert order(everyone, 1) == ["c", "y", "b", "x", "a"]


def test_a_run_survives_its_file():
    one = run(gains=[gains(summary=Tie(3, 0.25))])
    assert msgspec.json.decode(msgspec.json.encode(one), type=Run) == one


def test_the_picture_is_a_png_and_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    from bench_peers.picture import draw

    for name in ("a.png", "b.png"):
        draw(run(), tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_peers_that_are_not_set_up_are_named(tmp_path):
    with pytest.raises(UsageError, match="run ci/peers"):
        all_peers(PeersFolder(tmp_path), tmp_path / "m.gguf")


def test_recipes_have_folders_of_their_own(tmp_path):
    recipes = all_recipes(tmp_path)
    assert (
        len({recipe.folder for recipe in recipes})
        == len({recipe.label for recipe in recipes})
        == len(recipes)
    )
    assert all(recipe.folder.parent == tmp_path for recipe in recipes)


def test_logits_of_a_peer_are_compared_by_definition(tmp_path):
    rng = np.random.default_rng(0)
    wanted, found = rng.normal(size=(5, 7)), rng.normal(size=(5, 7)).astype(np.float32)
    p = np.exp(wanted) / np.exp(wanted).sum(1, keepdims=True)
    q = np.exp(found) / np.exp(found).sum(1, keepdims=True)
    kept = SimpleNamespace(
        header=SimpleNamespace(token_ids=(1,) * 5, vocab_size=7),
        chunks=lambda: iter([(0, np.log(p[:3]).astype(np.float32)), (3, np.log(p[3:]).astype(np.float32))]),
    )
    np.save(tmp_path / "x.npy", found)
    result = compare(tmp_path / "x.npy", kept)
    assert result.kl == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-5)
    assert result.top1 == (p.argmax(1) == q.argmax(1)).mean()
    np.save(tmp_path / "x.npy", found[:4])
    with pytest.raises(ArtifactError, match=r"\(4, 7\) where the text has \(5, 7\)"):
        compare(tmp_path / "x.npy", kept)


def test_the_first_processor_describes_the_machine():
    text = (
        "processor\t: 0\nmodel name\t: Some CPU: fast\nflags\t\t: avx2 amx_int8\n\nprocessor\t: 1\nmodel "
        "name\t: Other\n"
    )
    fields = cpu_fields(text)
    assert fields["model name"] == "Some CPU: fast"
    assert fields["flags"].split() == ["avx2", "amx_int8"]
    assert cpu_fields("") == {}
    here = this_machine()
    assert here.cores > 0
    assert here.cpu
