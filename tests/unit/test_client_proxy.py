"""Proxies of the environment: never between a client and its own machine, and named where one is in the
way.
"""

from __future__ import annotations

import asyncio

import pytest

from llorch_serve.client.asynchronous import AsyncWorkerClient
from llorch_serve.client.blocking import WorkerClient
from llorch_serve.client.proxy import is_loopback, proxy_variable
from llorch_serve.errors import WorkerError
from support.fakes.generator import INFO, FakeGenerator
from support.harness.rpc import running_server

NOBODY = "http://127.0.0.1:1"  # where nothing listens
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:50051", True),
        ("127.8.8.8:1", True),
        ("localhost:50051", True),
        ("LOCALHOST:50051", True),
        ("[::1]:50051", True),
        ("0.0.0.0:50051", True),
        ("dns:///localhost:50051", True),
        ("ipv4:127.0.0.1:50051", True),
        ("localhost.example.org:50051", False),
        ("10.0.0.1:50051", False),
        ("[2001:db8::1]:50051", False),
        ("", False),
    ],
)
def test_what_is_on_this_machine(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize(
    ("environment", "address", "expected"),
    [
        ({}, "a.example:1", None),
        ({"http_proxy": "p"}, "a.example:1", "http_proxy"),
        ({"http_proxy": "p", "https_proxy": "q"}, "a.example:1", "https_proxy"),
        ({"grpc_proxy": "r", "https_proxy": "q"}, "a.example:1", "grpc_proxy"),
        ({"http_proxy": ""}, "a.example:1", None),
        ({"HTTP_PROXY": "p"}, "a.example:1", None),  # which gRPC does not look at
        ({"http_proxy": "p", "no_proxy": "b.example, a.example"}, "a.example:1", None),
        ({"http_proxy": "p", "no_proxy": ".example"}, "a.example:1", None),
        ({"http_proxy": "p", "no_proxy": "10.0.0.0/8"}, "10.1.2.3:1", None),
        ({"http_proxy": "p", "no_proxy": "10.0.0.0/8"}, "11.1.2.3:1", "http_proxy"),
        (
            {"http_proxy": "p", "no_grpc_proxy": "b.example", "no_proxy": "a.example"},
            "a.example:1",
            "http_proxy",
        ),
        ({"http_proxy": "p"}, "127.0.0.1:1", None),
    ],
)
def test_which_variable_puts_a_proxy_in_the_way(
    environment: dict[str, str], address: str, expected: str | None
) -> None:
    assert proxy_variable(address, environment) == expected


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_calls_of_this_machine_are_direct(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, NOBODY)

    async def asked(address: str) -> str:
        async with AsyncWorkerClient(address) as client:
            return (await client.model_info()).model_id

    generator = FakeGenerator()
    with running_server(generator) as running:
        with WorkerClient(running.address) as client:
            assert client.model_info() == INFO
        assert asyncio.run(asked(running.address)) == INFO.model_id
    generator.close()


def test_an_error_behind_a_proxy_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", NOBODY)
    with WorkerClient("192.0.2.1:50051") as client:
        with pytest.raises(WorkerError) as caught:
            client.model_info()
        assert "the proxy that http_proxy names" in str(caught.value)
        assert "no_proxy=192.0.2.1" in str(caught.value)
        with pytest.raises(WorkerError, match="http_proxy"):
            client.wait_until_ready(0.05)


def test_an_error_without_a_proxy_names_none() -> None:
    with WorkerClient("127.0.0.1:1") as client, pytest.raises(WorkerError) as caught:
        client.model_info()
    assert "proxy" not in str(caught.value)
