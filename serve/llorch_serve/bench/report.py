"""The result of a benchmark, as a document for scripts and as a table for people."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llorch_serve.bench.measure import Figures
from llorch_serve.reference_file import Fidelity

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    """What ``llorch bench --json`` prints.

    recipe: who made the model's folder, its precisions, and what it cannot do. load_s, peak_rss_mib: of this process; None for a worker behind gRPC.
    fidelity: divergence from ``--reference FILE``; None without it.
    """

    schema_version: int
    recipe: dict[str, object]
    provider: str
    load_s: float | None
    peak_rss_mib: float | None
    results: list[Figures]
    fidelity: Fidelity | None = None


def table(report: Report) -> str:
    """Return the report as lines of text."""
    precision = ", ".join(f"{key} {value}" for key, value in report.recipe.items() if value is not None)
    lines = [f"{precision} on {report.provider}"]
    if report.load_s is not None and report.peak_rss_mib is not None:
        lines[0] += f"; loaded in {report.load_s:.2f} s; peak memory {report.peak_rss_mib:.0f} MiB"
    lines.append(
        f"{'streams':>7} {'prefill tok/s':>14} {'decode tok/s':>13} {'ttft p50/p99 ms':>18} {'itl p50/p99 ms':>18}"
    )
    for row in report.results:
        ttft, itl = row.ttft_ms, row.itl_ms
        lines.append(
            f"{row.streams:>7} {row.prefill_tokens_per_s:>14.1f} {row.decode_tokens_per_s:>13.1f} "
            f"{f'{ttft.p50:.0f} / {ttft.p99:.0f}':>18} {f'{itl.p50:.2f} / {itl.p99:.2f}':>18}"
        )
    if (fidelity := report.fidelity) is not None:
        lines.append(
            f"KL {fidelity.kl:.3g} nats, top-1 {fidelity.top1:.2%} over {fidelity.tokens} tokens of {fidelity.text} "
            f"text, against {fidelity.oracle}"
        )
    return "\n".join(lines) + "\n"


def peak_rss_mib() -> float:
    """Return the most memory this process has held, in MiB."""
    if sys.platform == "win32":
        info: Any = psutil.Process().memory_info()  # its type depends on the system
        peak = float(info.peak_wset)
    elif sys.platform == "linux":
        # getrusage would count what the parent process held when it started this one.
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        peak = int(status.split("VmHWM:")[1].split()[0]) * 2**10
    else:
        import resource

        peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak / 2**20
