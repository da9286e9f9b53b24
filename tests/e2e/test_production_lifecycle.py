"""Beginning and end of a worker process: bound before it loads, checked without serving, gone when idle,
codes by class.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from llorch_serve.artifact import folder as artifact_module
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.errors import CancelledError, QueueFullError, UnavailableError, WorkerError
from llorch_serve.lifecycle.serving import serve
from llorch_serve.requests import GenerationRequest, TextPrompt
from llorch_serve.rpc.server import ServerConfig
from llorch_serve.sampling.params import SamplingParams
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness.processes import llorch, llorch_here, running, serving


def endless(name):
    sampling = SamplingParams(temperature=0, max_tokens=150_000, ignore_eos=True)
    return GenerationRequest(name, TextPrompt("Once"), sampling)


def test_preload_only_loads_says_so_and_opens_no_port(tiny, tiny_worker):
    outcome = llorch_here("serve", tiny, "--preload-only", "--port", tiny_worker.port)
    assert (outcome.code, outcome.stdout) == (0, "")
    assert "\nloaded source (" in f"\n{outcome.stderr}"
    assert "CPUExecutionProvider with 8 slots of 128 tokens" in outcome.stderr


def test_preload_only_has_the_exit_code_of_what_is_wrong(tiny, tmp_path):
    assert llorch_here("serve", tmp_path, "--preload-only").code == 3
    short = llorch_here("serve", tiny, "--preload-only", "--kv-cache-memory", "1")
    assert (short.code, "--kv-cache-memory" in short.error()) == (6, True)


def test_want_of_memory_is_told_by_its_code(tiny, monkeypatch):
    def load(*_arguments, **_settings):
        raise MemoryError

    monkeypatch.setattr("llorch_serve.loading.models.load_artifact", load)
    assert artifact_module.load_artifact is not load
    outcome = llorch_here("serve", tiny, "--preload-only")
    assert (outcome.code, "memory does not suffice" in outcome.error()) == (6, True)


def test_a_source_is_exported_behind_an_open_port_and_a_signal_ends_that(tiny_gguf, tmp_path):
    with running("serve", "--port", "0", tiny_gguf, LLORCH_CACHE=tmp_path / "cache") as worker:
        address = worker.wait_for_line(r"^listening at (\S+), loading").group(1)
        with WorkerClient(address) as client:
            assert client.load().load_percent <= 90
            with pytest.raises(UnavailableError, match="loading"):
                client.model_info()
        worker.process.terminate()
        assert worker.wait() == 0
        assert not any("Traceback" in line for line in worker.log)
    assert not list((tmp_path / "cache").glob("*/llorch.json"))


def test_a_failed_export_ends_the_worker_with_its_code(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF nonsense")
    outcome = llorch("serve", "--port", "0", tmp_path / "model.gguf", LLORCH_CACHE=tmp_path / "cache")
    assert outcome.code == 3
    assert "Traceback" not in outcome.stderr
    assert outcome.stderr.count("error: ") == 1


def test_a_taken_port_fails_before_a_source_is_exported(tiny_gguf, tmp_path, tiny_worker):
    outcome = llorch("serve", "--port", tiny_worker.port, tiny_gguf, LLORCH_CACHE=tmp_path / "cache")
    assert outcome.code == 5
    assert not (tmp_path / "cache").exists()


def test_progress_counts_the_artifacts_bytes(tiny):
    with serving(tiny) as worker, WorkerClient(worker.address) as client:
        load = client.load()
    size = sum(path.stat().st_size for path in tiny.iterdir() if path.is_file())
    assert (load.loaded_bytes, load.total_bytes, load.load_percent) == (size, size, 100.0)


def test_an_idle_worker_stops_and_a_used_one_does_not():
    generator = FakeGenerator(free_running=False)
    done = []

    def use(address):
        def call():
            with WorkerClient(address) as client:
                request = GenerationRequest("r", TextPrompt("a"), SamplingParams(max_tokens=2))
                updates = client.generate(request)
                for _ in range(2):
                    threading.Timer(0.4, generator.step).start()  # longer than the worker would stay idle
                    done.append(next(updates).text)

        threading.Thread(target=call, daemon=True).start()

    config = ServerConfig(port=0, idle_timeout_s=0.3)
    asyncio.run(asyncio.wait_for(serve(lambda: generator, config, on_ready=use), PATIENCE_S))
    assert done == ["w0 ", "w1 "]
    assert generator.closed


def test_garbage_is_not_looked_for_in_what_was_loaded():
    before, while_serving = gc.get_freeze_count(), []
    config = ServerConfig(port=0, idle_timeout_s=0.01)
    ready = lambda _address: while_serving.append(gc.get_freeze_count())  # noqa: E731
    asyncio.run(asyncio.wait_for(serve(FakeGenerator, config, on_ready=ready), PATIENCE_S))
    assert while_serving[0] > before + 10_000
    assert gc.get_freeze_count() == 0


def test_the_flag_ends_an_idle_process(tiny):
    with serving(tiny, "--idle-timeout", "0.05") as worker:
        assert worker.command.wait() == 0
        assert any("no call for 0.05 s; stopping" in line for line in worker.command.log)


def test_bounds_of_the_queue_and_of_messages_are_flags(tiny, long):
    flags = ("--slots", "1", "--max-queued-requests", "1", "--max-message-bytes", "2KiB")
    with (
        ThreadPoolExecutor() as pool,  # ends last: its calls end with the worker at the latest
        serving(long, *flags) as worker,
        WorkerClient(worker.address) as client,
    ):
        running_one = client.generate(endless("running"))
        next(running_one)
        queued = pool.submit(client.complete, endless("queued"))
        while client.load().waiting == 0:
            pass
        with pytest.raises(
            QueueFullError, match="1 requests are waiting, and this worker queues 1"
        ) as caught:
            client.complete(endless("refused"))
        assert caught.value.retry_after_s > 0
        with pytest.raises(WorkerError, match=r"\d{4} vs\. 2048"):
            client.tokenize(TextPrompt("a" * 3000))
        assert set(client.abort("running", "queued")) == {"running", "queued"}
        assert isinstance(queued.exception(PATIENCE_S), CancelledError)
        with pytest.raises(CancelledError):
            list(running_one)
    outcome = llorch_here("serve", tiny, "--max-message-bytes", "12")
    assert (outcome.code, "--max-message-bytes" in outcome.error()) == (2, True)
