"""The result of a benchmark as a document: what ``llorch bench --json`` writes and every report is made from.

A report holds entries (a model on a provider, or a worker), an entry holds rows (one test each), a row holds
figures by name. Rows of two reports belong together where label and test are equal.
``artifacts/bench.schema.json`` is generated from these types by ``ci/generate-schema``; docs/bench.md says
what each test does and each figure means.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from llorch_serve.artifact.manifest import Count
from llorch_serve.files.documents import read_document

SCHEMA_VERSION: Final = 2
_MAX_BYTES: Final = 64 * 2**20

Better = Literal["higher", "lower"]
Share01 = Annotated[float, msgspec.Meta(ge=0, le=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the document's parts: immutable, and strict about unknown fields."""


class Figure(_Struct, frozen=True, kw_only=True):
    """One quantity over the counted runs of a test.

    median, low, high: of ``values``, which are in the order of the runs. better: which direction is the
        better one;
    absent where there is none (a count, say).
    """

    unit: str
    better: Better | None = None
    median: float
    low: float
    high: float
    values: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]


def figure(values: Sequence[float], unit: str, better: Better | None = None) -> Figure:
    """Return the figure of at least one run."""
    return Figure(
        unit=unit,
        better=better,
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        values=tuple(map(float, values)),
    )


class OfflineTest(_Struct, frozen=True, kw_only=True, tag_field="kind", tag="offline"):
    """Streams that start together on an engine in a process of its own.

    work: ``prefill`` (the prompt alone), ``decode`` (a prompt of one token) or ``mixed`` (both).
    prompt_tokens, generated_tokens: of each stream. depth: tokens that its slot of the KV cache holds before.
    """

    work: Literal["prefill", "decode", "mixed"]
    prompt_tokens: Count
    generated_tokens: Count
    depth: NonNegative = 0
    streams: Count


class ServingTest(_Struct, frozen=True, kw_only=True, tag_field="kind", tag="serving"):
    """Requests to a running worker.

    arrivals: ``together`` (``concurrency`` streams that start at once), ``closed`` (so many clients, each of
        which sends its
    next request when the last is answered) or ``open`` (``rate_per_s`` in the mean; see ``burstiness``).
    prompt_tokens, generated_tokens: of each request, or the middle of the range that ``spread`` says; None:
        as the dataset has it.
    spread: lengths are drawn evenly from (1 - spread) to (1 + spread) of the middle. dataset: name and hash
        of the file with the prompts.
    burstiness: shape of the gamma distribution that gaps are drawn from; 1: Poisson arrivals. seed: of all
        draws.
    requests, duration_s: sent in all in one run, or for how long some are sent; None where that follows from
        the others.
    limits_ms: what a request must keep to count as good, by name of the figure. http: over OpenAI's routes,
        not gRPC.
    """

    arrivals: Literal["together", "closed", "open"]
    prompt_tokens: Count | None = None
    generated_tokens: Count | None = None
    spread: Share01 = 0
    dataset: str | None = None
    concurrency: Count | None = None
    rate_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    burstiness: Annotated[float, msgspec.Meta(gt=0)] | None = None
    seed: int | None = None
    requests: Count | None = None
    duration_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    limits_ms: dict[str, float] = {}
    http: bool = False


Test = OfflineTest | ServingTest


class Problem(_Struct, frozen=True, kw_only=True):
    """Why something was not measured. exit_code: of the error's class, as the command line ends with it."""

    exit_code: int
    message: str


class Failure(_Struct, frozen=True, kw_only=True):
    """Requests of all counted runs that failed with one status: gRPC's name, HTTP's number, or what broke.

    after_first_token: how many of them had begun to answer. tokens: what those had sent. example: the first
        one's words.
    """

    status: str
    requests: Count
    after_first_token: NonNegative
    tokens: NonNegative
    example: str


class Row(_Struct, frozen=True, kw_only=True):
    """What one test found: figures by name, or why there are none. failures: requests that are in no other
    figure but ``failed``.
    """

    test: Test
    figures: dict[str, Figure] = {}
    failures: tuple[Failure, ...] = ()
    problem: Problem | None = None


class Share(_Struct, frozen=True, kw_only=True):
    """What one execution provider has of the graph: parts of its nodes, and of the bytes of weights."""

    provider: str
    node_share: Share01
    weight_share: Share01


class Model(_Struct, frozen=True, kw_only=True):
    """What was measured, as far as it says so itself.

    kind: the tool that made the folder. fingerprint: tells models apart. folder_bytes: of the files that it
        lists; None for a worker.
    rules: departures from the precision, module by module. limits: what its graph cannot do.
    """

    model_id: str
    fingerprint: str
    kind: str
    precision: str
    head_precision: str
    target: str | None = None
    block_size: int | None = None
    rules: int = 0
    compute_type: str | None = None
    kv_dtype: str | None = None
    folder_bytes: int | None = None
    context_length: int
    slots: int
    limits: tuple[str, ...] = ()


class FidelityResult(_Struct, frozen=True, kw_only=True):
    """Divergence from a reference file; see :class:`llorch_serve.fidelity.reference_file.Fidelity` for the
    fields.
    """

    kl: float
    top1: Share01
    max_abs: float
    tokens: Count
    text: str
    oracle: str
    limit: float
    passed: bool
    same_source: bool
    prefill_kl: float | None = None
    decode_kl: float | None = None


class Energy(_Struct, frozen=True, kw_only=True):
    """Where energy was read. sources: the counters' names; empty: none, and ``absent`` says why."""

    sources: tuple[str, ...] = ()
    absent: str | None = None


class Entry(_Struct, frozen=True, kw_only=True):
    """One model on one provider, or one worker.

    label: its name in this report, the same in every run of the same command line; no two entries share one.
    provider: onnxruntime's name. software: distributions that decide its speed, like ``onnxruntime 1.32.0``.
    placement: of nodes and weights; empty where the runtime does not tell.
    load_s, peak_rss_mib: of its process, None for a worker. peak_rss_mib is host memory before fidelity is
        measured.
    problem: why it was not measured to the end; its rows are those before.
    """

    label: str
    provider: str
    software: tuple[str, ...] = ()
    model: Model | None = None
    placement: tuple[Share, ...] = ()
    threads: int | None = None
    load_s: float | None = None
    peak_rss_mib: float | None = None
    energy: Energy | None = None
    fidelity: FidelityResult | None = None
    rows: tuple[Row, ...] = ()
    problem: Problem | None = None


class Host(_Struct, frozen=True, kw_only=True):
    """The machine that measured. gpus: as NVIDIA's driver names them; others are not listed."""

    system: str
    cpu: str
    cpu_features: tuple[str, ...]
    cpus: int
    cpus_allowed: int
    memory_bytes: int
    gpus: tuple[str, ...] = ()


class Report(_Struct, frozen=True, kw_only=True):
    """The document. version: llorch's. created: UTC, ISO 8601. repeat: counted runs of each test, after one
    that warms up.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    version: str
    created: str
    host: Host
    repeat: Count
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1)]


def read_report(path: Path) -> Report:
    """Read a document. Raises UsageError for anything else than one of this version."""
    what = f"report of schema version {SCHEMA_VERSION}"
    return read_document(path, Report, what=what, made_by="llorch bench --json", most_bytes=_MAX_BYTES)
