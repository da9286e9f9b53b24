"""A report's forms: JSON by its schema, terminal, Markdown, CSV, and the page, with the answer that they
give.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import msgspec
import pytest

from llorch_serve.bench import wording
from llorch_serve.bench.page import html
from llorch_serve.bench.schema import Energy, Problem, Report, Row, ServingTest, Share, figure, read_report
from llorch_serve.bench.tables import comma_separated, markdown, terminal
from llorch_serve.bench.verdict import verdict
from llorch_serve.errors import UsageError
from support.builders.bench_reports import DECODE, DEEP, MODEL, PREFILL, entry, fidelity, report, rows, speed

FAST = entry("fast", rows((400.0, 410.0), (50.0, 52.0)), fidelity=fidelity(0.008))
EXACT = entry(
    "exact",
    rows((200.0, 210.0), (51.0, 49.0)),
    fidelity=fidelity(1e-6),
    placement=(
        Share(provider="OtherExecutionProvider", node_share=0.9, weight_share=0.8),
        Share(provider="CPUExecutionProvider", node_share=0.1, weight_share=0.2),
    ),
)
BROKEN = entry("broken", problem=Problem(exit_code=4, message="the wheel is missing."), model=None)
LOAD = ServingTest(
    arrivals="open",
    prompt_tokens=10,
    generated_tokens=5,
    rate_per_s=2.5,
    requests=7,
    limits_ms={"ttft_ms": 200.0},
)


def everything() -> Report:
    deep = Row(test=DEEP, problem=Problem(exit_code=4, message="no reuse"))
    served = Row(
        test=LOAD,
        figures={
            "goodput_per_s": figure([2.0], "requests/s", "higher"),
            "errors": figure([1.0], "requests"),
        },
    )
    return report(FAST, msgspec.structs.replace(EXACT, rows=(*EXACT.rows, deep, served)), BROKEN)


def test_the_document_fits_the_published_schema_and_comes_back_the_same(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(msgspec.json.encode(everything()))
    folder = Path(__file__).parents[2] / "artifacts"
    schema = json.loads((folder / "bench.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads(path.read_bytes()))
    assert read_report(path) == everything()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 1}, "schema version 2"),
        ({"surprise": 1}, "surprise"),
        ({"entries": []}, "entries"),
        ({"repeat": "3"}, "repeat"),
    ],
)
def test_other_documents_are_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(json.loads(msgspec.json.encode(everything())) | change))
    with pytest.raises(UsageError, match=says) as caught:
        read_report(path)
    assert "make it again with llorch bench --json" in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000])
def test_what_is_no_document_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(UsageError, match="is no report"):
        read_report(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_report(tmp_path / "absent")


def test_tests_in_words_differ() -> None:
    tests = wording.tests_of(everything())
    assert [wording.describe_test(test) for test in tests] == [
        "prefill 64, 1 stream",
        "decode 16, 1 stream",
        "decode 16 behind 32, 2 streams",
        "open loop, 2.5 requests/s (Poisson), 7 requests, 10 + 5 tokens, ttft_ms <= 200 ms",
    ]
    assert wording.describe_test(
        ServingTest(arrivals="closed", prompt_tokens=1, generated_tokens=2, concurrency=3)
    ) == ("closed loop, 3 clients, 1 + 2 tokens")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (12345.6, "12346"),
        (123.456, "123.5"),
        (1.5, "1.5"),
        (0.012344, "0.01234"),
        (1.234e-8, "1.23e-08"),
    ],
)
def test_numbers_are_shown_with_the_digits_that_matter(value: float, shown: str) -> None:
    assert wording.amount(value) == shown


def test_the_terminal_has_a_line_for_each_test_and_entry() -> None:
    text = terminal(everything())
    lines = text.splitlines()
    assert lines[0].startswith("llorch 0.1.0 on A CPU, 2 of 4 CPUs, 8 GiB")
    assert "90.0% of nodes and 80.0% of weights on OtherExecutionProvider" in text
    table = lines[lines.index("") + 1 :]
    assert re.split(r"\s{2,}", table[0])[:3] == ["test", "entry", "prefill tok/s"]
    assert re.split(r"\s{2,}", table[1])[:3] == ["prefill 64, 1 stream", "fast", "405 (400..410)"]
    assert re.split(r"\s{2,}", table[2].strip())[:2] == ["exact", "205 (200..210)"]
    assert "exact, decode 16 behind 32, 2 streams: no reuse" in lines
    assert "failed the wheel is missing." in text
    assert not any(line.endswith(" ") for line in lines)


def test_energy_says_where_it_is_from_or_why_it_is_not_there() -> None:
    counted = entry("a", energy=Energy(sources=("package-0",)))
    assert wording.describe_energy(counted) == "package-0"
    assert wording.describe_energy(entry("b")) == "not measured: no counters"


def test_markdown_has_a_table_and_no_raw_signs() -> None:
    odd = msgspec.structs.replace(MODEL, model_id="a|b_<c>")
    text = markdown(report(entry("x|y", rows((1.0,), (2.0,)), model=odd), repeat=1))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert r"x\|y" in table[2]
    assert r"a\|b\_\<c>" in text


def test_csv_has_a_line_for_each_figure_and_each_failure() -> None:
    lines = list(csv.DictReader(io.StringIO(comma_separated(everything()))))
    first = lines[0]
    assert (first["entry"], first["work"], first["streams"], first["figure"]) == (
        "fast",
        "prefill",
        "1",
        "prefill_tokens_per_s",
    )
    assert (float(first["median"]), float(first["low"]), float(first["high"]), first["runs"]) == (
        405,
        400,
        410,
        "2",
    )
    served = next(line for line in lines if line["kind"] == "serving")
    assert (served["rate_per_s"], served["limits_ms"], served["figure"]) == (
        "2.5",
        "ttft_ms=200",
        "goodput_per_s",
    )
    failed = {(line["entry"], line["depth"]): line["problem"] for line in lines if line["problem"]}
    assert failed == {("exact", "32"): "no reuse", ("broken", ""): "the wheel is missing."}
    assert all(None not in line for line in lines)


class Page(HTMLParser):
    """Counts what a page has; fails at tags that do not close."""

    VOID = frozenset({"meta", "br", "link", "line", "rect", "circle", "path"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [value for name, value in attrs if name in ("src", "href")], "something from outside"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_and_shows_every_entry() -> None:
    source = html(everything())
    page = Page(source)
    assert "script" not in page.tags
    assert "http" not in source.replace("http-equiv", "")
    assert "@import" not in source
    assert "url(" not in source
    # Of each entry a bar in prefill and decode, a point of two; the failed one has words instead.
    assert page.tags.count("rect") == 2 + 2 + 1
    assert page.tags.count("circle") == 2
    assert page.text.count("the wheel is missing") >= 2
    assert "405" in page.text
    assert "400..410" in page.text


def test_names_on_the_page_are_text() -> None:
    hostile = '<script>alert("x")</script>'
    model = msgspec.structs.replace(MODEL, model_id=hostile)
    source = html(report(entry(hostile, rows((1.0,), (1.0,)), model=model), entry("b", rows((2.0,), (2.0,)))))
    assert "script" not in Page(source).tags


def test_bars_are_as_long_as_their_figures() -> None:
    source = html(report(FAST, EXACT))
    widths = [float(value) for value in re.findall(r'<rect [^>]*width="([\d.]+)"', source)]
    assert widths[1] / widths[0] == pytest.approx(205 / 405, abs=0.005)
    assert widths[3] / widths[2] == pytest.approx(50 / 51, abs=0.005)


def test_the_best_of_each_column_is_marked_of_those_that_can_be_used() -> None:
    off = entry("off", rows((900.0,), (900.0,)), fidelity=fidelity(0.5, passed=False))
    source = html(report(FAST, EXACT, off))
    marked = re.findall(r'<td class="best">([^<]*)', source)
    # Of entries that are alike in memory, disk and load none is the best there.
    assert marked == ["405 tok/s", "1e-06 (98.0%)"]  # decode is within the spread
    assert "<td>90.0%, 80.0%</td>" not in source  # of another provider than the entry's own
    other = html(report(msgspec.structs.replace(EXACT, provider="OtherExecutionProvider"), FAST))
    assert "<td>90.0%, 80.0%</td>" in other
    assert "too far from the reference" in source


def test_names_in_the_plot_do_not_stand_upon_each_other() -> None:
    twins = [entry(name, rows((1.0,), (50.0,)), fidelity=fidelity(0.008)) for name in ("one", "two", "three")]
    source = html(report(*twins))
    places = [float(y) for y in re.findall(r'<circle [^>]*/><text x="[^"]*" y="([\d.]+)"', source)]
    assert len(places) == 3
    assert min(after - before for before, after in itertools.pairwise(places)) >= 15


def test_one_entry_leaves_nothing_to_choose() -> None:
    assert verdict(report(FAST)) == []
    Page(html(report(FAST)))


def test_the_answer_names_the_fastest_beyond_the_spread() -> None:
    sentences = verdict(report(FAST, EXACT))
    assert sentences[0] == (
        "fast is the fastest in prefill 64, 1 stream, and none beyond the spread of the runs elsewhere."
    )
    assert "prefill 64, 1 stream: fast with 405 tok/s, 1.98 times exact." in sentences
    assert (
        "decode 16, 1 stream: fast with 51 tok/s, 1.02 times exact (within the spread of the runs)."
        in sentences
    )
    assert sentences[-1].startswith(
        "Nearest to the reference first: exact (KL 1e-06 nats, top-1 98.0%), fast "
    )


def test_the_answer_depends_on_the_work_where_it_does() -> None:
    other = entry("other", rows((100.0,), (90.0,)))
    sentences = verdict(report(FAST, other))
    assert sentences[0] == (
        "It depends on the work: fast is the fastest in prefill 64, 1 stream. "
        "other is the fastest in decode 16, 1 stream."
    )


def test_the_answer_leaves_out_what_failed_or_is_far_off() -> None:
    off = entry("off", rows((900.0,), (900.0,)), fidelity=fidelity(0.5, passed=False))
    sentences = verdict(report(FAST, off, BROKEN))
    assert sentences[0] == "Only fast can be used."
    assert sentences[-2].startswith(
        "Not considered: off departs from the reference by more than its recipe allows"
    )
    assert sentences[-1] == "Not considered: broken failed: the wheel is missing."
    assert verdict(report(off, BROKEN))[0] == "None of them can be used."


def test_the_answer_says_where_nothing_is_known_of_fidelity() -> None:
    sentences = verdict(report(entry("a", rows((1.0,), (1.0,))), entry("b", rows((1.0,), (1.0,)))))
    assert sentences[0] == "None is faster than the next beyond the spread of its runs."
    assert sentences[-1].startswith("Fidelity was not measured")


def test_a_speed_of_nothing_is_no_division() -> None:
    still = entry("still", (Row(test=DECODE, figures=speed("decode_tokens_per_s", 0.0)),))
    moving = entry("moving", (Row(test=DECODE, figures=speed("decode_tokens_per_s", 2.0)),))
    assert "moving with 2 tok/s, more than still" in verdict(report(still, moving))[1]
    Page(html(report(still)))


def test_headlines_are_the_shallow_tests_with_fewest_and_most_streams() -> None:
    tests = [
        msgspec.structs.replace(PREFILL, streams=streams, depth=depth)
        for depth in (0, 32)
        for streams in (1, 2, 8)
    ]
    found = tuple(Row(test=test, figures=speed("prefill_tokens_per_s", 1.0)) for test in tests)
    source = html(report(entry("a", found)))
    heads = re.findall(r"<th>([^<]*)</th>", source.split("</table>")[0])
    assert heads[1:3] == ["prefill 64, 1 stream", "prefill 64, 8 streams"]
