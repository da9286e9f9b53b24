"""What a search found, as a document, as a table, as a picture's marks, and as the evidence of a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from llorch_export.tune.choice import Standings
from llorch_export.tune.standing import Scenario, Standing
from llorch_serve.bench.schema import Host

_CHOSEN, _ON, _OFF = "chosen", "on the frontier", "other recipes"


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One recipe.

    prefill_kl, decode_kl: of each graph, where prompts have one of their own; ``kl`` is the larger.
    prefill_chunk: most prompt tokens in one step.
    speeds: medians in tokens/s. rounds: counted ones. ratio: to the default's speed, by turns; margin: what
    may be noise, as a part of it; None where that is not known, and of the default.
    frontier: no other recipe is as fast, as small and as near.
    left_out: why it was not chosen, or not measured to the end.
    """

    label: str
    prefill_chunk: int
    kl: float | None
    top1: float | None
    prefill_kl: float | None
    decode_kl: float | None
    folder_bytes: int | None
    peak_mib: float | None
    speeds: dict[Scenario, float]
    rounds: int
    ratio: float | None
    margin: float | None
    frontier: bool
    left_out: str | None


class TuneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``llorch tune --json`` prints.

    complete: false where it was interrupted. chosen: label of the recipe to keep; None: no recipe keeps the
    bounds. recipe, artifact: where they were written, if they were. export, serve: the commands that export
    by the recipe, and that serve what is exported as it was measured. oracle: what divergence is measured
    from, over ``positions`` tokens. round_noise: the standard deviation of one round's ratio, as a part of
    it.
    """

    source: str
    complete: bool
    chosen: str | None
    default: str
    recipe: str | None
    artifact: str | None
    command: str
    export: str | None
    serve: str | None
    oracle: str
    positions: int
    host: Host
    software: tuple[str, ...]
    max_kl: float
    memory_mib: float | None
    prefer: str
    seconds: float
    round_noise: float | None
    tried: tuple[Tried, ...]


def tried(found: Standings) -> tuple[Tried, ...]:
    """Return every recipe: those whose speed is known first, the fastest at the head."""
    frontier = found.frontier()
    order = sorted(found.measured(), key=lambda one: -found.score(one).value)
    rest = [one for one in found.all() if one not in order]
    return tuple(_tried(one, found, on_it=one in frontier) for one in (*order, *rest))


def _tried(standing: Standing, found: Standings, *, on_it: bool) -> Tried:
    fidelity = standing.judgement.fidelity
    known = bool(standing.ratios)
    score = found.score(standing) if known else None
    return Tried(
        label=standing.candidate.label,
        prefill_chunk=standing.candidate.prefill_chunk,
        kl=None if fidelity is None else fidelity.kl,
        top1=None if fidelity is None else fidelity.top1,
        prefill_kl=None if fidelity is None else fidelity.prefill_kl,
        decode_kl=None if fidelity is None else fidelity.decode_kl,
        folder_bytes=standing.judgement.folder_bytes,
        peak_mib=standing.peak_mib,
        speeds=standing.medians(),
        rounds=len(standing.ratios),
        ratio=None if score is None else score.ratio,
        margin=_margin(standing, found),
        frontier=on_it,
        left_out=standing.problem or found.beyond(standing) or standing.lost,
    )


def _margin(standing: Standing, found: Standings) -> float | None:
    if not standing.ratios or standing is found.default:
        return None
    return math.expm1(found.score(standing).margin(found.trust()))


def table(report: TuneReport) -> str:
    """Return the recipes as a table in Markdown."""
    names = list(next((one.speeds for one in report.tried if one.speeds), {}))
    head = ["recipe", "KL, nats", "peak MiB", *(f"{name}, tokens/s" for name in names), "to the default", ""]
    lines = [_row(head), "|---" * len(head) + "|"]
    for one in report.tried:
        speeds = [f"{one.speeds[name]:.1f}" if one.speeds else "" for name in names]
        lines.append(_row([one.label, _number(one.kl, ".3g"), _number(one.peak_mib, ".0f"), *speeds,
                           _ratio(one, report), _mark(one, report)]))  # fmt: skip
    return "\n".join(lines) + "\n"


def marks(report: TuneReport) -> list[tuple[str, float, float, str]]:
    """Return what to draw: label, ratio to the default, divergence, series; by what was measured of both."""
    found = []
    for one in report.tried:
        if one.ratio is None or one.kl is None:
            continue
        series = _CHOSEN if one.label == report.chosen else _ON if one.frontier else _OFF
        size = "" if one.peak_mib is None else f" ({one.peak_mib:.0f} MiB)"
        found.append((one.label + size, one.ratio, max(one.kl, _LEAST_KL), series))
    return found


_LEAST_KL: Final = 1e-7  # of a picture whose axis is logarithmic


def evidence(report: TuneReport, created: str) -> dict[str, object]:
    """Return what a recipe's ``[evidence]`` says: where, with what and how it was found."""
    chosen = next(one for one in report.tried if one.label == report.chosen)
    default = next(one for one in report.tried if one.label == report.default)
    host = report.host
    features = ", ".join(host.cpu_features)
    memory = f"{host.memory_bytes / 2**30:.0f} GiB"
    return {
        "created": created,
        "command": report.command,
        "source": report.source,
        "machine": f"{host.cpu}, {host.cpus_allowed} of {host.cpus} CPUs with {features}, {memory}, "
        f"{host.system}",
        "software": list(report.software),
        "reference": f"{report.oracle}, over {report.positions} positions",
        "recipes_tried": len(report.tried),
        "chosen": _figures(chosen),
        "default": _figures(default),
    }


def _figures(one: Tried) -> dict[str, object]:
    values = {
        "recipe": one.label,
        "kl": one.kl,
        "peak_mib": one.peak_mib,
        "speed_to_default": one.ratio,
        "margin": one.margin,
        "rounds": one.rounds,
        "tokens_per_s": one.speeds,
    }
    return {name: value for name, value in values.items() if value is not None}


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ratio(one: Tried, report: TuneReport) -> str:
    if one.ratio is None:
        return ""
    if one.label == report.default:
        return "1"
    return f"{one.ratio:.3f}" + ("" if one.margin is None else f" ± {one.ratio * one.margin:.3f}")


def _mark(one: Tried, report: TuneReport) -> str:
    words = []
    if one.label == report.chosen:
        words.append("**chosen**")
    if one.frontier:
        words.append("frontier")
    if one.left_out is not None and one.label != report.chosen:
        words.append(one.left_out)
    return ", ".join(words)
