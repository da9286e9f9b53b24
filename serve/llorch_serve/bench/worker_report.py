"""A report on a running worker: what it says of itself, and the rows that a client measured."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from datetime import UTC, datetime

from llorch_serve.bench.resources import look_at_host
from llorch_serve.bench.schema import Entry, Model, Report, Row, Share
from llorch_serve.requests import ModelInfo


def report_on_worker(info: ModelInfo, rows: Sequence[Row], repeat: int) -> Report:
    """Return the report. Its host is the client's."""
    model = Model(
        model_id=info.model_id,
        fingerprint=info.fingerprint,
        kind=info.kind,
        precision=info.precision,
        head_precision=info.head_precision,
        context_length=info.context_length,
        slots=info.slots,
        limits=info.limits,
    )
    placement = tuple(
        Share(provider=share.provider, node_share=share.node_share, weight_share=share.weight_share)
        for share in info.provider_shares
    )
    entry = Entry(
        label="worker",
        provider=info.provider,
        software=(f"llorch {info.version}",),
        model=model,
        placement=placement,
        rows=tuple(rows),
    )
    return Report(
        version=importlib.metadata.version("llorch"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        host=look_at_host(),
        repeat=repeat,
        entries=(entry,),
    )
