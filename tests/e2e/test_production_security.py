"""TLS, client certificates and bearer tokens, through real channels."""

from __future__ import annotations

import contextlib
import io
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from llorch_serve.client.blocking import WorkerClient
from llorch_serve.client.channel import Access
from llorch_serve.errors import AuthenticationError, CancelledError, WorkerError
from llorch_serve.requests import GenerationRequest, TextPrompt
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.security import Certificate, Security
from llorch_serve.sampling.params import SamplingParams
from support.builders.certificates import make_certificates
from support.fakes.generator import PATIENCE_S, FakeGenerator
from support.harness.processes import llorch_here, running, serving
from support.harness.rpc import open_stub, running_server

REQUEST = GenerationRequest("r", TextPrompt("Hi"), SamplingParams(max_tokens=2))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def certificate(certificates):
    return Certificate(certificates.server_cert.read_bytes(), certificates.server_key.read_bytes())


@contextlib.contextmanager
def secured(security, **generator):
    made = FakeGenerator(**generator)
    with running_server(made, security=security) as server:
        yield server.address, made


# Tokens.


@pytest.mark.parametrize(
    ("metadata", "fits"),
    [
        ((("authorization", "Bearer one"),), True),
        ((("authorization", "bearer two"),), True),
        ((), False),
        ((("authorization", "Bearer "),), False),
        ((("authorization", "Bearer on"),), False),
        ((("authorization", "Bearer onee"),), False),
        ((("authorization", "one"),), False),
        ((("authorization", "Basic one"),), False),
        ((("authorization-bin", b"Bearer one"),), False),
    ],
)
def test_only_a_known_token_gets_in(metadata, fits):
    with secured(Security(tokens=("one", "two"))) as (address, generator), open_stub(address) as stub:
        call = stub.Generate.future(
            pb.GenerateRequest(input=pb.Input(text="a"), sampling=pb.Sampling(max_tokens=1)),
            metadata=metadata,
            timeout=PATIENCE_S,
        )
        assert call.code() is (grpc.StatusCode.OK if fits else grpc.StatusCode.UNAUTHENTICATED)
        assert len(generator.submitted) == fits


def test_every_method_but_health_asks_for_the_token():
    with secured(Security(tokens=("one",))) as (address, _), grpc.insecure_channel(address) as channel:
        for method in pb.DESCRIPTOR.services_by_name["GenerationService"].methods:
            call = channel.unary_stream(f"/{method.containing_service.full_name}/{method.name}")(b"")
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED, method.name
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        listing = reflect(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=PATIENCE_S
        )
        assert listing.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).status == 1
        assert next(health.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)).status == 1


def test_a_caller_aborts_its_own_requests_only():
    with (
        secured(Security(tokens=("one", "two")), free_running=False) as (address, generator),
        WorkerClient(address, Access(token="one")) as owner,
        WorkerClient(address, Access(token="two")) as other,
        ThreadPoolExecutor() as pool,
    ):
        answer = pool.submit(owner.complete, REQUEST)
        generator.wait_for(lambda g: g.live_ids)
        assert other.abort("r") == ()
        assert generator.live_ids == ["r"]
        assert owner.abort("r") == ("r",)
        assert isinstance(answer.exception(PATIENCE_S), CancelledError)


def test_the_client_without_a_token_learns_what_is_missing():
    with secured(Security(tokens=("one",))) as (address, _), WorkerClient(address) as client:
        with pytest.raises(AuthenticationError, match="bearer token"):
            client.model_info()
        with pytest.raises(AuthenticationError, match="bearer token"):
            list(client.generate(REQUEST))


# TLS.


def test_tls_carries_the_calls_of_whoever_trusts_the_authority(certificates, certificate):
    with secured(Security(certificate=certificate)) as (address, _):
        trusting = Access(tls=True, ca=certificates.ca.read_bytes())
        with WorkerClient(address, trusting) as client:
            client.wait_until_ready(PATIENCE_S)
            assert client.complete(REQUEST)[0].text == "w0 w1 "
        for access in (Access(), Access(tls=True)):
            with WorkerClient(address, access) as client, pytest.raises(WorkerError):
                client.model_info()


def test_mtls_asks_for_a_certificate_and_tells_holders_apart(certificates, certificate):
    ca = certificates.ca.read_bytes()
    own = Access(
        tls=True, ca=ca, chain=certificates.client_cert.read_bytes(), key=certificates.client_key.read_bytes()
    )
    strange = Access(
        tls=True,
        ca=ca,
        chain=certificates.stranger_cert.read_bytes(),
        key=certificates.stranger_key.read_bytes(),
    )
    server = Access(
        tls=True, ca=ca, chain=certificates.server_cert.read_bytes(), key=certificates.server_key.read_bytes()
    )
    security = Security(certificate=certificate, client_ca=ca)
    with secured(security, free_running=False) as (address, generator), ThreadPoolExecutor() as pool:
        for access in (strange, Access(tls=True, ca=ca)):
            with WorkerClient(address, access) as client, pytest.raises(WorkerError):
                client.model_info()
        with WorkerClient(address, own) as client, WorkerClient(address, server) as other:
            answer = pool.submit(client.complete, REQUEST)
            generator.wait_for(lambda g: g.live_ids)
            assert other.abort("r") == ()
            assert client.abort("r") == ("r",)
            assert isinstance(answer.exception(PATIENCE_S), CancelledError)


# The commands.


def test_flags_of_worker_and_client_meet(tiny, certificates, monkeypatch):
    server = ("--tls-cert", certificates.server_cert, "--tls-key", certificates.server_key)
    mutual = (*server, "--tls-client-ca", certificates.ca, "--require-auth")
    with serving(tiny, *mutual, LLORCH_API_TOKEN="s3cret") as worker:
        ask = ("generate", "--connect", worker.address, "--prompt", "a", "--max-tokens", "2", "--json")
        tls = (
            "--tls-ca",
            certificates.ca,
            "--tls-cert",
            certificates.client_cert,
            "--tls-key",
            certificates.client_key,
        )
        document = llorch_here(*ask, *tls, LLORCH_API_TOKEN="s3cret").document()
        assert len(document["token_ids"]) <= 2
        assert llorch_here(*ask, *tls, "--token", "s3cret").document()["token_ids"] == document["token_ids"]
        refused = llorch_here(*ask, *tls, "--token", "other", LLORCH_API_TOKEN="s3cret")  # a flag wins
        assert (refused.code, "bearer token" in refused.error()) == (7, True)
        assert llorch_here(*ask, "--token", "s3cret").code == 7
        bench = (
            "bench",
            "--connect",
            worker.address,
            "--prompt-tokens",
            "4",
            "--max-tokens",
            "2",
            "--repeat",
            "1",
        )
        assert llorch_here(*bench, "--streams", "1", "--json", *tls, "--token", "s3cret").document()
        score = (
            "score",
            "--connect",
            worker.address,
            "--context",
            "a",
            "--continuation",
            "b",
            "--json",
            *tls,
        )
        assert llorch_here(*score, "--token", "s3cret").document()["scores"]
        monkeypatch.setattr(
            "sys.stdin", io.StringIO()
        )  # no question is asked, but the worker is, what it serves
        chat = ("chat", "--connect", worker.address, *tls)
        assert [llorch_here(*chat, LLORCH_API_TOKEN=token).code for token in ("s3cret", "other")] == [0, 7]
        assert not any("s3cret" in line or "warning" in line for line in worker.command.log)


@pytest.mark.parametrize(
    ("flags", "variables", "says"),
    [
        ((), {"LLORCH_API_TOKEN": ""}, "LLORCH_API_TOKEN is empty"),
        ((), {"LLORCH_API_TOKEN": "  "}, "LLORCH_API_TOKEN is empty"),
        ((), {"LLORCH_API_TOKEN": "a b"}, "no header can carry"),
        (("--token-file", "{folder}/empty"), {}, "holds no token"),
        (("--token-file", "{folder}/none"), {}, "cannot be read"),
        (("--tls-cert", "{folder}/server.pem"), {}, "belong together"),
        (
            ("--tls-cert", "{folder}/server.pem", "--tls-key", "{folder}/client.key"),
            {},
            "cannot be used together",
        ),
        (("--tls-cert", "{folder}/empty", "--tls-key", "{folder}/empty"), {}, "cannot be used together"),
        (("--tls-client-ca", "{folder}/ca.pem"), {}, "needs --tls-cert"),
        (("--require-auth",), {}, "callers need not say who they are"),
        (("--require-auth", "--host", "0.0.0.0"), {}, "anybody who reaches"),
        (("--require-auth", "--host", "0.0.0.0"), {"LLORCH_API_TOKEN": "a"}, "in the clear"),
    ],
)
def test_a_worker_refuses_secrets_that_are_none(tiny, certificates, flags, variables, says):
    folder = certificates.ca.parent
    (folder / "empty").write_text("\n \n")
    outcome = llorch_here(
        "serve", tiny, "--port", "0", *(f.format(folder=folder) for f in flags), **variables
    )
    assert outcome.code == 2
    assert says in outcome.error()


@pytest.mark.parametrize("flags", [("--host", "0.0.0.0"), ("--http", "0.0.0.0:0")])
@pytest.mark.parametrize(
    ("variables", "says"), [({}, "anybody who reaches 0.0.0.0"), ({"LLORCH_API_TOKEN": "a"}, "in the clear")]
)
def test_an_open_worker_beyond_loopback_says_so(tiny, flags, variables, says):
    with running("serve", tiny, "--port", "0", *flags, **variables) as worker:
        worker.wait_for_line(f"^warning: .*{says}.*--tls-cert with --tls-key")


def test_access_flags_without_a_worker_are_refused(tiny):
    for flag, value in (("--token", "a"), ("--tls-ca", "x"), ("--tls-cert", "x"), ("--tls-key", "x")):
        for command in (
            ("generate", tiny, "--prompt", "a"),
            ("score", tiny, "--continuation", "a"),
            ("chat", tiny),
        ):
            outcome = llorch_here(*command, flag, value)
            assert (outcome.code, f"{flag} has no effect" in outcome.error()) == (2, True), command
