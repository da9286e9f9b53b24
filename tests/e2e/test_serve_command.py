"""``llorch serve`` as a process: its flags, its life from SERVING to the end of a drain."""

from __future__ import annotations

import json
import os
import signal

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.engine.sequence import FinishReason
from llorch_serve.errors import UnavailableError
from llorch_serve.requests import GenerationRequest, TextPrompt
from llorch_serve.runtime import huge_pages
from llorch_serve.sampling.params import SamplingParams
from support.builders.checkpoints import write_hf_folder
from support.harness.processes import PATIENCE_S, llorch_here, running, serving


def endless(request_id="endless", tokens=150_000):
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(request_id, TextPrompt("Once"), sampling)


def test_flags_shape_the_worker(tiny):
    flags = ("--host", "127.0.0.2", "--slots", "3", "--max-context", "64", "--threads", "4")
    with serving(tiny, *flags) as worker, WorkerClient(worker.address) as client:
        assert worker.address.startswith("127.0.0.2:")
        info = client.model_info()
        assert (info.slots, info.context_length) == (3, 64)
        four = psutil.Process(worker.command.process.pid).num_threads()
    with serving(tiny, "--threads", "1") as worker:
        assert four - psutil.Process(worker.command.process.pid).num_threads() >= 3


def test_the_process_serves_health_and_the_model(tiny_worker):
    with grpc.insecure_channel(tiny_worker.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=PATIENCE_S
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with WorkerClient(tiny_worker.address) as client:
        info = client.model_info()
        assert (info.model_id, info.vocab_size, info.context_length) == ("source", 512, 128)
        assert (info.precision, info.provider, info.has_chat_template) == (
            "int8",
            "CPUExecutionProvider",
            True,
        )
        assert info.provider_node_share == 1.0


def test_model_path_and_tokenizer_path_are_honoured(tiny, tmp_path):
    data = json.loads((tiny / "tokenizer.json").read_text())
    data["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with serving(MODEL_PATH=tiny, TOKENIZER_PATH=tmp_path) as worker, WorkerClient(worker.address) as client:
        ids, _ = client.tokenize(TextPrompt("Paris"))
        assert client.detokenize(ids) == " Paris"


def test_a_source_is_served_from_the_cache(tiny_source, tmp_path):
    with serving("--model", tiny_source, LLORCH_CACHE=tmp_path) as worker:
        assert any("exported to" in line for line in worker.command.log)
        with WorkerClient(worker.address) as client:
            assert client.model_info().vocab_size == 512


def test_a_model_without_end_of_sequence_says_so_when_it_is_loaded(tmp_path, export_here):
    source = write_hf_folder(
        tmp_path / "source", {"eos_token_id": None}, tokenizer_config={"eos_token": None}
    )
    with serving(export_here(source, tmp_path / "a")) as worker, WorkerClient(worker.address) as client:
        assert any("no end-of-sequence token" in line for line in worker.command.log)
        *_, last = client.generate(GenerationRequest("a", TextPrompt("Once"), SamplingParams(max_tokens=20)))
        assert (last.completion.reason, last.completion.generated_tokens) == (FinishReason.LENGTH, 20)


def test_sigterm_lets_running_answers_finish(long):
    with serving(long) as worker, WorkerClient(worker.address) as client:
        answer = client.generate(endless(tokens=3_000))
        tokens = len(next(answer).token_ids)
        os.kill(worker.command.process.pid, signal.SIGTERM)
        for update in answer:
            tokens += len(update.token_ids)
        assert (update.completion.reason, tokens) == (FinishReason.LENGTH, 3_000)
        assert worker.command.wait() == 0


def test_the_drain_ends_at_its_timeout(long):
    with serving(long, "--drain-timeout", "0") as worker, WorkerClient(worker.address) as client:
        answer = client.generate(endless())
        next(answer)
        os.kill(worker.command.process.pid, signal.SIGTERM)
        with pytest.raises(UnavailableError, match="send the request to another"):
            list(answer)
        assert worker.command.wait() == 0


def test_a_second_signal_ends_the_drain(long):
    with serving(long) as worker, WorkerClient(worker.address) as client:
        answer = client.generate(endless())
        next(answer)
        os.kill(worker.command.process.pid, signal.SIGINT)
        with grpc.insecure_channel(worker.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=PATIENCE_S
            )
            draining = (m.status == health_pb2.HealthCheckResponse.NOT_SERVING for m in watch)
            assert any(draining)
        os.kill(worker.command.process.pid, signal.SIGINT)
        with pytest.raises(UnavailableError):
            list(answer)
        assert worker.command.wait() == 0


def test_an_abandoned_answer_frees_its_slot(long):
    with serving(long, "--slots", "1") as worker, WorkerClient(worker.address) as client:
        for index in range(10):
            answer = client.generate(endless(f"a{index}"))
            next(answer)
            answer.close()
        *_, last = client.generate(endless("last", tokens=3))
        assert last.completion.generated_tokens == 3


def test_slots_must_be_positive(tiny):
    outcome = llorch_here("serve", tiny, "--slots", "0")
    assert (outcome.code, "--slots" in outcome.error()) == (2, True)


@pytest.mark.parametrize(
    ("flags", "told"), [((), True), (("--huge-pages",), True), (("--no-huge-pages",), False)]
)
def test_weights_lie_in_huge_pages_unless_they_are_not_to(tiny, flags, told):
    lack = huge_pages.lacking()
    if lack is not None and "--huge-pages" in flags:  # where the system cannot, it is refused
        assert llorch_here("serve", tiny, "--port", "0", *flags).code == 2
        return
    says = "MiB in huge pages" if lack is None else f"weights stay in small pages: {lack}"
    with running("serve", tiny, "--port", "0", *flags) as command:
        command.wait_for_line("^serving ")
        assert any(says in line for line in command.log) is told
