"""A pool manager over real HTTP: one that listens, refuses, delays, dies, comes back and forgets."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import threading
import time
from dataclasses import replace
from datetime import datetime

import psutil
import pytest

from llorch_serve.cluster.interfaces import ReplicaLoad
from llorch_serve.cluster.totals import Tally
from llorch_serve.errors import ArtifactError, UsageError, WorkerError
from llorch_serve.lifecycle.serving import serve
from llorch_serve.observe.tap import ObservedGenerator
from llorch_serve.pool import post
from llorch_serve.pool.messages import ready
from llorch_serve.pool.reporter import PoolConfig, PoolReporter
from llorch_serve.rpc.server import ServerConfig
from support.builders.certificates import make_certificates
from support.fakes.generator import INFO, LOAD, FakeGenerator
from support.fakes.pool_manager import PATIENCE_S, Manager
from support.harness.processes import llorch_here, serving

QUICK = {"heartbeat_s": 0.02, "timeout_s": 5.0, "first_pause_s": 0.01, "longest_pause_s": 0.02}


class Worker:
    """serve() with a fake generator and a reporter, on the main thread; the test's story runs beside it, then
    stops it.
    """

    def __init__(self, url, story, *, load=FakeGenerator, about=None, **changes):
        self.address = None
        self.failure = None
        config = PoolConfig("w1", post.read_url(url), **{"host": "worker.example", **QUICK, **changes})

        def run():
            try:
                story(self)
            except BaseException as error:  # noqa: BLE001 - told by the test itself
                self.failure = error
            os.kill(os.getpid(), signal.SIGTERM)

        def bound(address):
            self.address = address
            self.thread.start()

        self.thread = threading.Thread(target=run, daemon=True)
        server = ServerConfig(port=0, drain_timeout_s=0)
        try:
            reporter = PoolReporter(config, **(about or {}))
            asyncio.run(serve(load, server, companions=(reporter,), on_bound=bound))
        finally:
            if self.thread.is_alive():
                self.thread.join(PATIENCE_S)
            if self.failure is not None:
                raise self.failure


def test_a_manager_is_told_what_the_contract_says():
    with Manager() as manager:

        def story(worker):
            ready = manager.next()
            port = worker.address.rsplit(":", 1)[1]
            memory = ready.pop("memory_bytes")
            assert ready == {
                "worker_id": "w1",
                "model_ref": "hf:somebody/fake",
                "uri": f"grpc://worker.example:{port}",
                "http_uri": None,
                "backend": "fake",
                "device": "fake:3",
                "device_memory_bytes": None,
                "memory_architecture": "unknown",
                "worker_type": "llorch",
                "capabilities": ["generate", "tokenize", "chat"],
                "protocol": "grpc",
                "version": INFO.version,
                "pid": os.getpid(),
            }
            assert memory == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
            first, second = manager.next(), manager.next()
            assert first["status"] == second["status"] == "ready"
            assert set(first) == {"worker_id", "timestamp", "status", "load"}
            assert datetime.fromisoformat(first["timestamp"]) < datetime.fromisoformat(second["timestamp"])
            assert datetime.fromisoformat(first["timestamp"]).utcoffset().total_seconds() == 0
            assert (first["load"]["slots"], first["load"]["state"]) == (8, "ready")

        Worker(manager.url, story, model_ref="hf:somebody/fake")
        last = [manager.told.get_nowait() for _ in range(manager.told.qsize())]
        assert [m["status"] for m in last[-2:]] == ["draining", "stopped"]


class Spread(FakeGenerator):
    """A generator whose model runs on two replicas."""

    def totals(self):
        return Tally("f").look([ReplicaLoad(name, "f", LOAD, 2**40, 2**34) for name in ("a", "b")])


def test_a_front_of_replicas_is_one_worker_with_their_memory_and_its_http_address():
    with Manager() as manager:

        def story(_worker):
            ready = manager.next()
            assert ready["worker_type"] == "llorch-cluster"
            assert ready["http_uri"] == "https://[fd00::1]:8443"
            assert ready["uri"].startswith("grpc://[fd00::1]:")
            assert 2**41 < ready["memory_bytes"] < 2**41 + 2**36
            assert ready["device_memory_bytes"] == 2**35

        Worker(
            manager.url,
            story,
            load=lambda: ObservedGenerator(Spread(), []),
            host="fd00::1",
            about={"http_url": lambda: "https://0.0.0.0:8443"},
        )


class Replaced(FakeGenerator):
    """A generator whose model is replaced once it is told."""

    info = INFO

    def model_info(self):
        return self.info


def test_a_manager_is_told_anew_of_a_model_that_was_replaced():
    generators = []

    def load():
        generators.append(Replaced())
        return generators[0]

    with Manager() as manager:

        def story(_worker):
            assert manager.next()["model_ref"] == INFO.model_id
            assert "status" in manager.next()
            generators[0].info = replace(INFO, model_id="another")
            while "uri" not in (message := manager.next()):
                pass
            assert message["model_ref"] == "another"

        Worker(manager.url, story, load=load)


def test_a_manager_that_keeps_refusing_ends_the_worker():
    with Manager(lambda _message: 403) as manager:

        def story(_worker):
            for _ in range(5):
                assert "uri" in manager.next()
            assert manager.next()["status"] == "draining"
            assert manager.next()["status"] == "failed"

        with pytest.raises(
            WorkerError, match=r"refused this worker 5 times, at last with HTTP 403.*--worker-id w1"
        ):
            Worker(manager.url, story)


def test_a_manager_that_is_late_or_broken_is_tried_again():
    answers = iter([500, 429, 403, 503, 200])
    with Manager(lambda message: next(answers) if "uri" in message else 200) as manager:

        def story(_worker):
            assert all("uri" in manager.next() for _ in range(5))
            assert "status" in manager.next()

        Worker(manager.url, story)


def test_a_manager_that_hangs_does_not_hold_up_the_worker():
    gate = threading.Event()
    with Manager(lambda message: 200 if "uri" in message or gate.wait(PATIENCE_S) else 500) as manager:

        def story(_worker):
            assert "uri" in manager.next()
            for _ in range(3):  # each beat gives up on the one before
                assert "status" in manager.next()

        began = time.monotonic()
        Worker(manager.url, story, timeout_s=0.1)
        assert time.monotonic() - began < PATIENCE_S
        gate.set()


def test_a_manager_that_dies_and_comes_back_is_told_anew():
    first = Manager()
    revived = []

    def story(_worker):
        assert "uri" in first.next()
        assert "status" in first.next()
        first.die()
        known = set()

        def answer(message):
            if "uri" in message:
                known.add(message["worker_id"])
            return 200 if message["worker_id"] in known else 404

        second = Manager(answer, port=first.port)
        revived.append(second)
        assert second.next()["status"] == "ready"  # refused: this one has never heard of the worker
        assert "uri" in second.next()
        assert second.next()["status"] == "ready"

    try:
        Worker(first.url, story)
    finally:
        for manager in revived:
            manager.die()


def test_a_manager_that_starts_later_than_its_worker():
    place = Manager()
    place.die()
    late = []

    def story(_worker):
        late.append(Manager(port=place.port))
        assert "uri" in late[0].next()

    try:
        Worker(place.url, story)
    finally:
        for manager in late:
            manager.die()


def test_a_failed_load_is_told():
    def load():
        raise ArtifactError("no artifact there")

    with Manager() as manager:
        with pytest.raises(ArtifactError):
            Worker(manager.url, lambda _worker: None, load=load)
        message = manager.next()
        assert (message["status"], message["load"]["state"]) == ("failed", "starting")


def test_a_manager_over_https(tmp_path, monkeypatch):
    certificates = make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates.server_cert, certificates.server_key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    with Manager(tls=tls) as manager:
        Worker(manager.url, lambda _worker: manager.next())
        assert manager.url.startswith("https://")


def test_a_worker_process_reports_and_shows_no_secret(tiny):
    with Manager() as manager:
        flags = ("--worker-id", "w7", "--callback-url", f"{manager.url}?key=s3cret", "--model-ref", "m")
        with serving(tiny, *flags) as worker:
            message = manager.next("ready")
            assert message["uri"] == f"grpc://{worker.address}"
            assert (message["backend"], message["device"], message["memory_architecture"]) == (
                "cpu",
                "cpu",
                "system",
            )
            assert message["memory_bytes"] == pytest.approx(
                psutil.Process(worker.command.process.pid).memory_info().rss, rel=0.2
            )
            assert message["pid"] == worker.command.process.pid
            worker.command.wait_for_line("knows this worker as w7")
            worker.command.process.terminate()
            assert worker.command.wait() == 0
            assert not any("s3cret" in line for line in worker.command.log)
        assert manager.next("draining")
        assert manager.next("stopped")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--callback-url", "http://a"), "--worker-id"),
        (("--worker-id", "w"), "no effect without --callback-url"),
        (("--model-ref", "w"), "no effect without --callback-url"),
        (("--callback-url", "http://a", "--worker-id", "w", "--host", "0.0.0.0"), "--advertise-host"),
    ],
)
def test_flags_that_do_not_go_together(tiny, flags, says):
    outcome = llorch_here("serve", tiny, *flags)
    assert outcome.code == 2
    assert says in outcome.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "manager",
        "ftp://a/b",
        "http://",
        "http://a:70000/",
        "http://u:p@a/",
        "http://a/ b",
        "http://[a/",
        "http://a/ü",
        "http://a..b/",
        f"http://{64 * 'a'}/",
    ],
)
def test_urls_that_nothing_can_be_posted_to(url):
    with pytest.raises(UsageError) as caught:
        post.read_url(url)
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize(
    ("provider", "backend", "device", "architecture"),
    [
        ("CPUExecutionProvider", "cpu", "cpu", "system"),
        ("CUDAExecutionProvider", "cuda", "cuda:1", "discrete"),
        ("DmlExecutionProvider", "directml", "gpu:0", "discrete"),
        ("OpenVINOExecutionProvider", "openvino", "cpu", "system"),
        ("OpenVINOExecutionProvider", "openvino", "gpu.1", "unknown"),
        ("NvTensorRTRTXExecutionProvider", "tensorrt", "cuda:0", "unknown"),
        ("OtherExecutionProvider", "other", "other", "unknown"),
    ],
)
def test_a_backend_has_the_name_that_the_provider_flag_takes(provider, backend, device, architecture):
    told = ready(
        replace(INFO, provider=provider, device=device), worker_id="w", model_ref=None, uri="grpc://a:1"
    )
    assert (told.backend, told.device, told.memory_architecture) == (backend, device, architecture)
