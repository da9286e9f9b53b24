"""Reports for tests of what is made from them, and entries' processes that answer from a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llorch_serve.bench.offline import QUANTITIES
from llorch_serve.bench.process import ProblemError
from llorch_serve.bench.protocol import Close, Closed, Judge, Judged, Open, Opened, Question, Ran, Run
from llorch_serve.bench.schema import (
    Energy,
    Entry,
    FidelityResult,
    Figure,
    Host,
    Model,
    OfflineTest,
    Problem,
    Report,
    Row,
    Share,
    figure,
)

HOST = Host(
    system="Linux 6 x86_64",
    cpu="A CPU",
    cpu_features=("avx2",),
    cpus=4,
    cpus_allowed=2,
    memory_bytes=8 * 2**30,
)
MODEL = Model(
    model_id="tiny",
    fingerprint="0" * 64,
    kind="llorch",
    precision="int8",
    head_precision="int8",
    target="cpu",
    block_size=32,
    compute_type="float32",
    kv_dtype="float32",
    folder_bytes=3 * 2**20,
    context_length=128,
    slots=2,
)
PREFILL = OfflineTest(work="prefill", prompt_tokens=64, generated_tokens=1, streams=1)
DECODE = OfflineTest(work="decode", prompt_tokens=2, generated_tokens=16, streams=1)
DEEP = OfflineTest(work="decode", prompt_tokens=2, generated_tokens=16, depth=32, streams=2)


def fidelity(kl: float = 0.001, *, passed: bool = True) -> FidelityResult:
    """Return a divergence."""
    return FidelityResult(
        kl=kl,
        top1=0.98,
        max_abs=0.1,
        tokens=100,
        text="sample",
        oracle="itself",
        limit=0.01,
        passed=passed,
        same_source=True,
    )


def speed(name: str, *values: float) -> dict[str, Figure]:
    """Return one figure of an offline test."""
    return {name: figure(values, *QUANTITIES[name])}


def rows(prefill: Sequence[float], decode: Sequence[float]) -> tuple[Row, ...]:
    """Return a row of each of two tests."""
    return (
        Row(
            test=PREFILL,
            figures=speed("prefill_tokens_per_s", *prefill)
            | speed("ttft_p50_ms", *(1000 / value for value in prefill)),
        ),
        Row(test=DECODE, figures=speed("decode_tokens_per_s", *decode)),
    )


def entry(label: str, found: tuple[Row, ...] = (), **fields: object) -> Entry:
    """Return an entry; ``fields`` replace or add."""
    given = {
        "provider": "CPUExecutionProvider",
        "software": ("llorch 0.1.0", "onnxruntime 1.32.0"),
        "model": MODEL,
        "placement": (Share(provider="CPUExecutionProvider", node_share=1.0, weight_share=1.0),),
        "threads": 2,
        "load_s": 1.5,
        "peak_rss_mib": 300.0,
        "energy": Energy(absent="no counters"),
    }
    return Entry(label=label, rows=found, **(given | fields))  # type: ignore[arg-type]


def report(*entries: Entry, **fields: object) -> Report:
    """Return a report."""
    given = {"version": "0.1.0", "created": "2026-11-28T12:00:00+00:00", "host": HOST, "repeat": 2}
    return Report(entries=entries, **(given | fields))  # type: ignore[arg-type]


class Scripted:
    """A process that answers; ``run`` gives the values of a test or raises. log: of everybody's questions, by
    label.
    """

    def __init__(
        self,
        label: str,
        log: list[tuple[str, str]],
        run: Callable[[OfflineTest], dict[str, float]] = lambda _test: {"prefill_tokens_per_s": 1.0},
        *,
        fails_at: str = "",
    ) -> None:
        self.label = label
        self.closed = 0
        self.opened: Open | None = None
        self._log = log
        self._run = run
        self._fails_at = fails_at

    def greet(self) -> None:
        self._note("greet")

    def ask(self, question: Question, kind: type) -> object:
        self._note(type(question).__name__)
        if isinstance(question, Open):
            self.opened = question
            answer: object = Opened(entry=entry(self.label, peak_rss_mib=None))
        elif isinstance(question, Run):
            answer = Ran(values=self._run(question.test))
        elif isinstance(question, Close):
            answer = Closed(peak_rss_mib=100.0)
        else:
            assert isinstance(question, Judge)
            answer = Judged(fidelity=fidelity())
        assert isinstance(answer, kind)
        return answer

    def close(self) -> None:
        self.closed += 1

    def _note(self, what: str) -> None:
        self._log.append((self.label, what))
        if what == self._fails_at:
            raise ProblemError(Problem(exit_code=4, message=f"no luck at {what}"))
