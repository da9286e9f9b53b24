"""Opening a model: from a folder into this process, or behind the address of a worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from llorch.asynchronous import AsyncModel
from llorch.blocking import Model
from llorch.settings import LoadSettings, engine_config
from llorch_serve.errors import UsageError

if TYPE_CHECKING:
    from llorch_serve.client.channel import Access
    from llorch_serve.loading.worker import AnyWorker
    from llorch_serve.runtime.opening import LoadReport

logger = logging.getLogger("llorch")


def load(
    folder: str | PathLike[str],
    *,
    tokenizer: str | PathLike[str] | None = None,
    public_key: str | PathLike[str] | None = None,
    **settings: Unpack[LoadSettings],
) -> Model:
    """Load an artifact, or a folder of onnxruntime-genai or Optimum, into this process.

    What a person should know of it goes to the logger ``llorch``. tokenizer: a tokenizer.json instead of the
    folder's. public_key: refuse files, those of a draft too, that its owner has not signed. Raises
    ArtifactError, ProviderError, ResourceError or UsageError, and TypeError or ValueError for a setting that
    there is not.
    """
    from llorch_serve.worker.local import LocalClient

    return Model(LocalClient(_opened(Path(folder), tokenizer, public_key, settings)))


async def load_async(
    folder: str | PathLike[str],
    *,
    tokenizer: str | PathLike[str] | None = None,
    public_key: str | PathLike[str] | None = None,
    **settings: Unpack[LoadSettings],
) -> AsyncModel:
    """Load a folder as :func:`load` does, for an event loop, which goes on meanwhile."""
    from llorch_serve.worker.local_async import AsyncLocalClient

    loading = _Loading()
    try:
        worker = await asyncio.to_thread(loading.run, Path(folder), tokenizer, public_key, settings)
    except asyncio.CancelledError:
        loading.leave()
        raise
    return AsyncModel(AsyncLocalClient(worker))


def connect(
    address: str,
    *,
    token: str | None = None,
    tls_ca: str | PathLike[str] | None = None,
    tls_cert: str | PathLike[str] | None = None,
    tls_key: str | PathLike[str] | None = None,
    wait_s: float | None = None,
) -> Model:
    """Connect to the worker at HOST:PORT; nothing is sent before the first call, unless ``wait_s`` is given.

    token: a bearer token. tls_ca: use TLS and trust these certificates (PEM). tls_cert, tls_key: the
    client's own, where the worker asks for one. wait_s: wait so many seconds until the worker serves; raises
    WorkerError or UnavailableError if it does not.
    """
    from llorch_serve.client.blocking import WorkerClient

    client = WorkerClient(address, _access(token, tls_ca, tls_cert, tls_key))
    if wait_s is not None:
        try:
            client.wait_until_ready(wait_s)
        except BaseException:
            client.close()
            raise
    return Model(client)


async def connect_async(
    address: str,
    *,
    token: str | None = None,
    tls_ca: str | PathLike[str] | None = None,
    tls_cert: str | PathLike[str] | None = None,
    tls_key: str | PathLike[str] | None = None,
    wait_s: float | None = None,
) -> AsyncModel:
    """Connect as :func:`connect` does, on the running event loop."""
    from llorch_serve.client.asynchronous import AsyncWorkerClient

    client = AsyncWorkerClient(address, _access(token, tls_ca, tls_cert, tls_key))
    if wait_s is not None:
        try:
            await client.wait_until_ready(wait_s)
        except BaseException:
            await client.close()
            raise
    return AsyncModel(client)


def _opened(
    folder: Path,
    tokenizer: str | PathLike[str] | None,
    public_key: str | PathLike[str] | None,
    settings: LoadSettings,
) -> AnyWorker:
    config = engine_config(settings)
    from llorch_serve.loading.worker import load_any, notes

    signed = []
    if public_key is not None:
        from llorch_serve.artifact.signature import check_signature

        folders = [folder] if config.draft is None else [folder, config.draft]
        signed = [check_signature(each, Path(public_key)) for each in folders]
    worker = load_any(folder, config, _log, tokenizer=None if tokenizer is None else Path(tokenizer))
    try:
        for each in signed:
            each.check_unchanged()
        for note in notes(worker):
            logger.info("%s", note)
    except BaseException:
        worker.close()
        raise
    return worker


def _log(report: LoadReport) -> None:
    if report.notice is not None:
        logger.info("%s", report.notice)


class _Loading:
    """A load on a thread, which cannot be stopped midway. Where nobody waits for it any more, the model is
    freed as soon as it is there, whether or not the event loop still runs then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: AnyWorker | None = None
        self._left = False

    def run(
        self,
        folder: Path,
        tokenizer: str | PathLike[str] | None,
        public_key: str | PathLike[str] | None,
        settings: LoadSettings,
    ) -> AnyWorker:
        """Load."""
        worker = _opened(folder, tokenizer, public_key, settings)
        with self._lock:
            self._worker, left = worker, self._left
        if left:
            worker.close()
        return worker

    def leave(self) -> None:
        """Free the model, now or as soon as it is loaded."""
        with self._lock:
            self._left, worker = True, self._worker
        if worker is not None:
            asyncio.get_running_loop().run_in_executor(None, worker.close)


def _access(
    token: str | None,
    tls_ca: str | PathLike[str] | None,
    tls_cert: str | PathLike[str] | None,
    tls_key: str | PathLike[str] | None,
) -> Access:
    """Return how a worker is reached. Raises UsageError for files that cannot be used, and an impossible
    token.
    """
    from llorch_serve.client.channel import Access
    from llorch_serve.rpc.security import load_authority, load_certificate

    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise UsageError("token holds none that a header can carry; expected printable ASCII")
    certificate = load_certificate(*(None if path is None else Path(path) for path in (tls_cert, tls_key)))
    ca = None if tls_ca is None else load_authority("tls_ca", Path(tls_ca))
    return Access(
        token=None if token is None else token.strip(),
        tls=ca is not None or certificate is not None,
        ca=ca,
        chain=None if certificate is None else certificate.chain,
        key=None if certificate is None else certificate.key,
    )
