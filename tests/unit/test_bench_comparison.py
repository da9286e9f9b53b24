"""``llorch bench compare``: what is joined with what, which ratio results, what passes and what is
refused.
"""

from __future__ import annotations

import msgspec
import pytest

from llorch_serve.bench.comparison import Comparison, Limits, compare_reports
from llorch_serve.bench.schema import Problem, Report, Row, figure
from llorch_serve.bench.tables import compared
from llorch_serve.errors import UsageError
from support.builders.bench_reports import (
    DECODE,
    DEEP,
    HOST,
    MODEL,
    PREFILL,
    entry,
    fidelity,
    report,
    rows,
    speed,
)

BEFORE = report(entry("cpu", rows((100.0, 110.0), (50.0, 52.0)), fidelity=fidelity()))


def after(*found: Row, **fields: object) -> Report:
    return report(entry("cpu", found, **({"fidelity": fidelity()} | fields)))


def compare(later: Report, fail_under: float = 0.95, *figures: str, before: Report = BEFORE) -> Comparison:
    return compare_reports(before, later, Limits(fail_under, figures))


def test_the_same_report_passes_with_ratios_of_one() -> None:
    found = compare(BEFORE)
    assert [one.ratio for one in found.ratios] == [1.0, 1.0, 1.0]
    assert (found.passed, found.failures, found.notes) == (True, (), ())


def test_above_one_is_better_in_either_direction() -> None:
    found = compare(after(*rows((210.0, 210.0), (25.5, 25.5))))
    ratios = {one.figure: one.ratio for one in found.ratios}
    assert ratios["prefill_tokens_per_s"] == pytest.approx(2.0)
    assert ratios["ttft_p50_ms"] == pytest.approx(2.0, rel=0.01)
    assert ratios["decode_tokens_per_s"] == pytest.approx(0.5)
    spread = next(one for one in found.ratios if one.figure == "prefill_tokens_per_s")
    assert (spread.low, spread.high) == (pytest.approx(210 / 110), pytest.approx(2.1))
    slower = next(one for one in found.ratios if one.figure == "ttft_p50_ms")
    assert slower.low <= slower.ratio <= slower.high


@pytest.mark.parametrize(("decode", "passes"), [(48.5, True), (48.4, False), (100.0, True)])
def test_a_speed_below_the_limit_fails(decode: float, passes: bool) -> None:
    found = compare(after(*rows((100.0, 110.0), (decode,))))
    assert found.passed is passes
    assert [one.passed for one in found.ratios if one.figure == "decode_tokens_per_s"] == [passes]


def test_latencies_are_shown_and_judged_only_where_named() -> None:
    slow = msgspec.structs.replace(
        BEFORE.entries[0].rows[0],
        figures=BEFORE.entries[0].rows[0].figures | speed("ttft_p50_ms", 99.0),
    )
    later = after(slow, BEFORE.entries[0].rows[1])
    assert compare(later).passed
    named = compare(later, 0.95, "ttft_p50_ms")
    assert not named.passed
    assert [one.figure for one in named.ratios if one.judged] == ["ttft_p50_ms"]
    with pytest.raises(UsageError, match=r"--figure is ttft_p5_ms.*they have decode_tokens_per_s"):
        compare(later, 0.95, "ttft_p5_ms")


@pytest.mark.parametrize(
    ("failed", "passes"), [((0, 0), True), ((2, 1), True), ((0, 1), False), ((2, 3), False)]
)
def test_more_failed_requests_than_before_fail(failed: tuple[int, int], passes: bool) -> None:
    first, second = (
        after(Row(test=PREFILL, figures={"failed": figure([float(count)], "requests", "lower")}))
        for count in failed
    )
    assert compare(second, before=first).passed is passes


def test_a_row_that_is_gone_fails_and_a_new_one_is_noted() -> None:
    first, second = BEFORE.entries[0].rows
    gone = compare(after(first))
    assert gone.failures == ("cpu, decode 16, 1 stream is missing",)
    assert not gone.passed
    more = compare(after(first, second, Row(test=DEEP, figures=speed("decode_tokens_per_s", 1.0))))
    assert (more.passed, more.notes) == (True, ("cpu, decode 16 behind 32, 2 streams is new",))


def test_a_row_that_fails_now_fails_with_its_reason_and_one_that_failed_before_does_not() -> None:
    first, second = BEFORE.entries[0].rows
    broken = Row(test=DECODE, problem=Problem(exit_code=4, message="no luck"))
    assert compare(after(first, broken)).failures == ("cpu, decode 16, 1 stream is missing: no luck",)
    assert compare(after(first, second), before=after(first, broken)).passed


def test_an_entry_that_is_gone_fails_and_a_new_one_is_noted() -> None:
    both = report(*BEFORE.entries, entry("openvino", rows((1.0,), (1.0,))))
    assert compare(BEFORE, before=both).failures == ("openvino is missing",)
    assert compare(both).notes == ("openvino is new",)
    failed = report(*BEFORE.entries, entry("openvino", problem=Problem(exit_code=4, message="absent")))
    assert compare(BEFORE, before=failed).passed  # it was not measured before either
    found = compare(failed, before=both)
    assert "openvino failed: absent" in found.failures


def test_lost_fidelity_fails_whatever_the_speed() -> None:
    lost = compare(after(*BEFORE.entries[0].rows, fidelity=fidelity(0.5, passed=False)))
    assert not lost.passed
    assert lost.failures[0].startswith("cpu departs from its reference: KL 0.5 nats")
    unmeasured = compare(after(*BEFORE.entries[0].rows, fidelity=None))
    assert unmeasured.failures == ("cpu has no fidelity any more",)
    bad = after(*BEFORE.entries[0].rows, fidelity=fidelity(0.5, passed=False))
    assert compare(bad, before=bad).passed


def test_what_else_differs_is_noted() -> None:
    model = msgspec.structs.replace(MODEL, precision="int4", fingerprint="1" * 64)
    later = after(*BEFORE.entries[0].rows, model=model, threads=4, software=("onnxruntime 2",))
    notes = compare(later).notes
    assert notes == (
        "cpu: software llorch 0.1.0, onnxruntime 1.32.0 and onnxruntime 2",
        "cpu: threads 2 and 4",
        "cpu: precision int8 and int4",
        "cpu: fingerprint 000000000000 and 111111111111",
    )


def test_other_machines_are_refused_unless_accepted() -> None:
    elsewhere = report(*BEFORE.entries, host=msgspec.structs.replace(HOST, cpu="Another CPU"))
    with pytest.raises(UsageError, match=r"cpu A CPU and Another CPU.*--across-machines"):
        compare(elsewhere)
    found = compare_reports(BEFORE, elsewhere, Limits(0.95), across_machines=True)
    assert found.passed
    assert found.notes == ("different machines: cpu A CPU and Another CPU",)


@pytest.mark.parametrize(("share", "same"), [(1.01, True), (1.03, False)])
def test_a_little_less_memory_is_the_same_machine(share: float, same: bool) -> None:
    host = msgspec.structs.replace(HOST, system="Linux 7", memory_bytes=int(HOST.memory_bytes * share))
    found = compare_reports(BEFORE, report(*BEFORE.entries, host=host), Limits(0.95), across_machines=True)
    assert (found.notes == ()) is same


def test_reports_without_anything_in_common_are_refused() -> None:
    with pytest.raises(UsageError, match="cpu with 2 tests against other with 2 tests"):
        compare(report(entry("other", BEFORE.entries[0].rows)))
    deep = Row(test=DEEP, figures=speed("decode_tokens_per_s", 1.0))
    with pytest.raises(UsageError, match="no figure in common"):
        compare(after(deep))


def test_nothing_to_nothing_is_no_change() -> None:
    still = Row(test=PREFILL, figures=speed("prefill_tokens_per_s", 0.0))
    moving = Row(test=PREFILL, figures=speed("prefill_tokens_per_s", 2.0))
    assert compare(after(still), before=after(still)).ratios[0].ratio == 1.0
    assert compare(after(moving), before=after(still)).passed
    assert not compare(after(still), before=after(moving)).passed


def test_the_table_ends_with_the_verdict() -> None:
    text = compared(compare(after(*rows((100.0, 110.0), (40.0,)))))
    lines = text.splitlines()
    assert lines[-1] == "failed: 1 of 2 judged figures below 0.95, 0 other failures"
    decode = next(line for line in lines if "decode, tok/s" in line)
    assert decode.split()[-2:] == ["below", "0.95"]
    assert "within spread" not in decode
    assert compared(compare(BEFORE)).endswith("passed: 0 of 2 judged figures below 0.95, 0 other failures\n")
