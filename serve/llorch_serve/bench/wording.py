"""Parts of a report in words, which every form of it shares: tests, figures, entries."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from llorch_serve.bench.schema import Entry, Figure, OfflineTest, Report, Row, Test
from llorch_serve.bench.serving.blocks import DETAILS, describe_load

UNITS: Final = {"tokens/s": "tok/s"}

TITLES: Final = {
    "prefill_tokens_per_s": "prefill",
    "decode_tokens_per_s": "decode",
    "tokens_per_s": "all tokens",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "requests_per_s": "throughput",
    "output_tokens_per_s": "generated",
    "tpot_p50_ms": "TPOT p50",
    "tpot_p99_ms": "TPOT p99",
    "e2e_p50_ms": "E2E p50",
    "e2e_p99_ms": "E2E p99",
    "good_requests_per_s": "goodput",
    "failed": "failed",
    "joules_per_token": "energy",
}
"""Figures in the order in which tables show them."""


def title(name: str) -> str:
    """Return what a figure is called; one that is not listed has its own name."""
    return TITLES.get(name, name.replace("_", " "))


def heading(name: str, found: Figure) -> str:
    """Return a column's heading: what it is called, and its unit."""
    unit = UNITS.get(found.unit, found.unit)
    return f"{title(name)} {unit}".rstrip()


def describe_test(test: Test) -> str:
    """Return a test in words, unlike every other's."""
    if isinstance(test, OfflineTest):
        tokens = {
            "prefill": f"prefill {test.prompt_tokens}",
            "decode": f"decode {test.generated_tokens}",
            "mixed": f"prefill {test.prompt_tokens} + decode {test.generated_tokens}",
        }[test.work]
        behind = f" behind {test.depth}" if test.depth else ""
        return f"{tokens}{behind}, {count(test.streams, 'stream')}"
    if test.arrivals == "together":
        return (
            f"{count(test.concurrency or 0, 'stream')} together, {test.prompt_tokens} + "
            f"{test.generated_tokens} tokens"
        )
    return describe_load(test)


def count(number: int, what: str) -> str:
    """Return a number of things."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def amount(value: float) -> str:
    """Return a number with four significant digits, or as many as stand before the point."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:.0f}"
    if size >= 0.001:
        return f"{value:.4g}"
    return f"{value:.3g}"


def spread(found: Figure) -> str:
    """Return the median, and from the lowest to the highest run where there are several."""
    if len(found.values) == 1:
        return amount(found.median)
    return f"{amount(found.median)} ({amount(found.low)}..{amount(found.high)})"


def columns(rows: Iterable[Row]) -> dict[str, Figure]:
    """Return every figure that some of the rows have, in the order of :data:`TITLES`, each with one that has
    it.

    Details of loads, and how long calls waited for stages, are left out: only JSON, CSV and a terminal's
    blocks have them.
    """
    found: dict[str, Figure] = {}
    for row in rows:
        for name, figure in row.figures.items():
            found.setdefault(name, figure)
    known = [name for name in TITLES if name in found]
    left_out = {*TITLES, *DETAILS, *(name for name in found if name.endswith("_waiting"))}
    others = [name for name in found if name not in left_out]
    return {name: found[name] for name in (*known, *others)}


def tests_of(report: Report) -> list[Test]:
    """Return every test of the report once, in the order in which they come."""
    found: list[Test] = []
    for entry in report.entries:
        found += [row.test for row in entry.rows if row.test not in found]
    return found


def row_of(entry: Entry, test: Test) -> Row | None:
    """Return an entry's row of a test, if it has one."""
    return next((row for row in entry.rows if row.test == test), None)


def describe_model(entry: Entry) -> str:
    """Return what an entry's model is and how its weights are stored."""
    model = entry.model
    if model is None:
        return "unknown model"
    parts = [
        model.precision
        if model.precision == model.head_precision
        else f"{model.precision}, head {model.head_precision}"
    ]
    if model.block_size is not None:
        parts.append(f"blocks of {model.block_size}")
    if model.rules:
        parts.append(count(model.rules, "rule"))
    if model.compute_type is not None:
        parts.append(f"computes in {model.compute_type}")
    if model.kv_dtype is not None:
        parts.append(f"cache in {model.kv_dtype}")
    by = "" if model.kind in ("llorch", "") else f", made by {model.kind}"
    return f"{model.model_id} ({', '.join(parts)}{by})"


def describe_placement(entry: Entry) -> str:
    """Return where nodes and weights are; empty where the runtime does not tell."""
    return ", ".join(
        f"{share.node_share:.1%} of nodes and {share.weight_share:.1%} of weights on {share.provider}"
        for share in entry.placement
    )


def describe_fidelity(entry: Entry) -> str:
    """Return the divergence from the reference, or that it was not measured."""
    fidelity = entry.fidelity
    if fidelity is None:
        return "not measured"
    verdict = "" if fidelity.passed else f", beyond the limit of {fidelity.limit:.3g}"
    other = "" if fidelity.same_source else ", of another checkpoint"
    return f"KL {fidelity.kl:.3g} nats, top-1 {fidelity.top1:.2%}{verdict}{other}"


def describe_energy(entry: Entry) -> str:
    """Return what counts energy, or why nothing does."""
    energy = entry.energy
    if energy is None:
        return "not measured"
    return ", ".join(energy.sources) if energy.sources else f"not measured: {energy.absent}"


def facts(entry: Entry) -> list[tuple[str, str]]:
    """Return what is known of an entry beside its rows: name and value, what is unknown left out."""
    found = [("model", describe_model(entry)), ("provider", entry.provider)]
    if placed := describe_placement(entry):
        found.append(("placement", placed))
    if entry.software:
        found.append(("software", ", ".join(entry.software)))
    if entry.threads is not None:
        found.append(("threads", str(entry.threads)))
    if entry.load_s is not None:
        found.append(("loaded in", f"{amount(entry.load_s)} s"))
    if entry.peak_rss_mib is not None:
        found.append(("peak host memory", f"{entry.peak_rss_mib:.0f} MiB"))
    if entry.model is not None and entry.model.folder_bytes is not None:
        found.append(("on disk", f"{entry.model.folder_bytes / 2**20:.0f} MiB"))
    found.append(("fidelity", describe_fidelity(entry)))
    if entry.fidelity is not None:
        found.append(
            (
                "reference",
                f"{entry.fidelity.tokens} tokens of {entry.fidelity.text} text, {entry.fidelity.oracle}",
            )
        )
    found.append(("energy", describe_energy(entry)))
    if entry.model is not None and entry.model.limits:
        found.append(("limits", "; ".join(entry.model.limits)))
    if entry.problem is not None:
        found.append(("failed", entry.problem.message))
    return found


def describe_host(report: Report) -> str:
    """Return the machine in a line."""
    host = report.host
    cards = f", {', '.join(host.gpus)}" if host.gpus else ""
    return (
        f"{host.cpu}, {host.cpus_allowed} of {host.cpus} CPUs, {host.memory_bytes / 2**30:.0f} GiB{cards}, "
        f"{host.system}"
    )


def describe_runs(report: Report) -> str:
    """Return how often was measured, and what figures are."""
    if report.repeat == 1:
        return "one counted run after a warm-up"
    return f"medians of {report.repeat} counted runs after a warm-up, with the lowest and the highest"
