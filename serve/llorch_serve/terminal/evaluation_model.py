"""The model that ``llorch eval`` asks: loaded in this process, or a worker's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from llorch_serve.config import EngineConfig, SessionConfig
from llorch_serve.terminal.access import WorkerFlags, connected
from llorch_serve.terminal.console import say
from llorch_serve.terminal.target import ModelFlags, find_tokenizer, resolve_artifact

if TYPE_CHECKING:
    from llorch_serve.evaluation.asking import AskedModel
    from llorch_serve.evaluation.schema import EvaluatedModel, Fidelity
    from llorch_serve.fidelity.reference_file import ReferenceFile


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model that answers. fidelity: None of a worker, which has no manifest to show."""

    asked: AskedModel
    fidelity: Fidelity | None
    address: str | None = None

    def described(self) -> EvaluatedModel:
        """Return what the document says of it."""
        from llorch_serve.evaluation.schema import EvaluatedModel

        info = self.asked.info
        return EvaluatedModel(
            model_id=info.model_id,
            fingerprint=info.fingerprint,
            precision=info.precision,
            head_precision=info.head_precision,
            provider=info.provider,
            device=info.device,
            context_length=info.context_length,
            slots=max(info.slots, 1),
            batch_invariant=info.batch_invariant,
            kind=info.kind,
            version=info.version,
            address=msgspec.UNSET if self.address is None else self.address,
        )


@contextlib.contextmanager
def open_asked(
    model: ModelFlags,
    worker: WorkerFlags,
    session: SessionConfig,
    reference: ReferenceFile | None,
) -> Iterator[OpenedModel]:
    """Open what the flags name: the worker of ``--connect``, or the model, which is loaded here.

    reference: what its divergence is measured against first; None: it is not.
    Raises what opening either raises.
    """
    if worker.connect is not None:
        from llorch_serve.evaluation.remote import RemoteModel

        with connected(worker.connect, worker.access(), worker.wait) as client:
            yield OpenedModel(RemoteModel(client), None, worker.connect)
        return
    from llorch_serve.evaluation.asking import MOST_WAITING, WAVE, LocalModel
    from llorch_serve.terminal.opening import check_signed, open_worker

    folder = resolve_artifact(model.target())
    signed = check_signed(folder, model.verify_signature)
    fidelity = _fidelity(folder, session, reference)
    # Nobody else waits here, however long prompts are.
    config = EngineConfig(session=session, max_waiting=MOST_WAITING + WAVE, max_waiting_tokens=2**40)
    loaded = open_worker(folder, config, tokenizer=find_tokenizer(), signed=signed)
    try:
        yield OpenedModel(LocalModel(loaded), fidelity)
    finally:
        loaded.close()


def _fidelity(folder: Path, session: SessionConfig, reference: ReferenceFile | None) -> Fidelity | None:
    from llorch_serve.evaluation.divergences import check_measurable, known, measure
    from llorch_serve.terminal.opening import report_load

    if reference is None:
        return known(folder)
    found = measure(check_measurable(folder, reference), reference, session, report_load)
    if found.measured is not msgspec.UNSET and not found.measured.same_source:
        say(f"note: {folder} was exported from other files than {reference.path} was written from")
    return found
