"""The process of one entry: loads a model in its own interpreter and runs tests as it is told. ``PYTHON -m
llorch_serve.bench.child``.

stdin and stdout carry :mod:`llorch_serve.bench.protocol`; whatever libraries print goes to stderr. It ends
with its stdin.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from llorch_serve.artifact.folder import Artifact
from llorch_serve.bench.energy import EnergyMeter, find_energy
from llorch_serve.bench.measure import LocalBackend
from llorch_serve.bench.offline import Offline
from llorch_serve.bench.protocol import (
    PROTOCOL,
    Answer,
    Close,
    Closed,
    Failed,
    Judge,
    Judged,
    Open,
    Opened,
    Question,
    Ran,
    Ready,
    Run,
)
from llorch_serve.bench.resources import peak_rss_mib, software
from llorch_serve.bench.schema import Energy, Entry, FidelityResult, Model, Problem, Share
from llorch_serve.bench.workload import text_prompt
from llorch_serve.config import SessionConfig
from llorch_serve.errors import LlorchError, UnsupportedError, UsageError
from llorch_serve.fidelity.judging import SLOTS
from llorch_serve.fidelity.reference_file import divergence, read_reference
from llorch_serve.loading.models import open_artifact
from llorch_serve.loading.worker import load_worker, notes
from llorch_serve.providers import usable_cpus
from llorch_serve.runtime.opening import LoadReport
from llorch_serve.worker.worker import Worker


class Child:
    """Answers questions. meter: of energy."""

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter = meter
        self._worker: Worker | None = None
        self._offline: Offline | None = None
        self._judged: tuple[Artifact, SessionConfig] | None = None

    def answer(self, question: Question) -> Answer:
        """Do what is asked. Failures are answers too."""
        try:
            return self._answer(question)
        except UnsupportedError as error:
            return Failed(problem=_problem(error.exit_code, str(error)), goes_on=isinstance(question, Run))
        except LlorchError as error:
            return _failed(error.exit_code, str(error))
        except MemoryError:
            return _failed(
                6, "memory does not suffice; use a smaller model, fewer streams or a shorter context"
            )
        except Exception as error:  # noqa: BLE001 - told to the process that asks, which goes on with other entries
            return _failed(1, f"unexpected {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the engine, if there is one."""
        if self._worker is not None:
            self._worker.close()
        self._worker = self._offline = None

    def _answer(self, question: Question) -> Answer:
        if isinstance(question, Open):
            return Opened(entry=self._open(question))
        if isinstance(question, Run):
            assert self._offline is not None
            return Ran(values=self._offline.run(question.test))
        if isinstance(question, Close):
            self.close()
            return Closed(peak_rss_mib=peak_rss_mib())
        return Judged(fidelity=self._judge(question))

    def _open(self, ask: Open) -> Entry:
        config = ask.settings.config()
        tokenizer = None if ask.tokenizer is None else Path(ask.tokenizer)
        started = time.perf_counter()
        worker = load_worker(Path(ask.folder), config, _report, tokenizer=tokenizer)
        load_s = time.perf_counter() - started
        for note in notes(worker):
            _say(note)
        self._worker = worker
        info = worker.model_info()
        if ask.longest > info.context_length:
            raise UsageError(
                f"the longest test needs a context of {ask.longest} tokens; this one has "
                f"{info.context_length}. "
                "Choose fewer tokens or a smaller depth"
            )
        ids = ask.prompt_ids or text_prompt(ask.longest, worker.tokenize)
        self._offline = Offline(
            LocalBackend(worker), ids, info.vocab_size, self._meter, lambda: worker.load().stages
        )
        if isinstance(worker.artifact, Artifact):
            self._judged = (worker.artifact, config.session)
        return Entry(
            label=ask.label,
            provider=info.provider,
            software=software(),
            model=_described(worker, config.session),
            placement=tuple(
                Share(provider=share.provider, node_share=share.node_share, weight_share=share.weight_share)
                for share in info.provider_shares
            ),
            threads=config.session.threads or usable_cpus(),
            load_s=load_s,
            energy=Energy(sources=self._meter.sources, absent=self._meter.absent),
        )

    def _judge(self, ask: Judge) -> FidelityResult:
        """Compare on a session of its own, after the one that was measured is gone."""
        assert self._judged is not None
        artifact, measured = self._judged
        reference = read_reference(Path(ask.reference))
        config = replace(measured, slots=SLOTS, max_context=max(len(reference.header.token_ids), 2))
        found = divergence(open_artifact(artifact, config, lambda _report: None), reference)
        return FidelityResult(**asdict(found))


def _say(note: str) -> None:
    sys.stderr.write(f"note: {note}\n")


def _report(report: LoadReport) -> None:
    if report.notice is not None:
        _say(report.notice)


def _described(worker: Worker, session: SessionConfig) -> Model:
    info, manifest = worker.model_info(), worker.artifact.manifest
    recipe = manifest.recipe
    artifact = worker.artifact if isinstance(worker.artifact, Artifact) else None
    return Model(
        model_id=info.model_id,
        fingerprint=info.fingerprint,
        kind=info.kind,
        precision=info.precision,
        head_precision=info.head_precision,
        target=None if artifact is None else artifact.manifest.target,
        block_size=recipe.block_size,
        rules=len(recipe.rules),
        compute_type=recipe.compute_type,
        kv_dtype=None if artifact is None else session.kv_dtype or artifact.manifest.kv_dtypes[0],
        folder_bytes=None if artifact is None else sum(entry.bytes for entry in artifact.manifest.files),
        context_length=info.context_length,
        slots=info.slots,
        limits=info.limits,
    )


def _problem(exit_code: int, message: str) -> Problem:
    return Problem(exit_code=exit_code, message=" ".join(message.split()))


def _failed(exit_code: int, message: str) -> Failed:
    return Failed(problem=_problem(exit_code, message))


def serve(questions: BinaryIO, answers: BinaryIO, child: Child) -> None:
    """Answer questions until they end."""

    def tell(answer: Answer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    tell(Ready(protocol=PROTOCOL, version=importlib.metadata.version("llorch")))
    decoder = msgspec.json.Decoder(Question)
    for line in questions:
        tell(child.answer(decoder.decode(line)))
    child.close()


def main() -> None:
    """Speak on the standard streams."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the other process decides
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, answers, Child(find_energy()))


if __name__ == "__main__":
    main()
