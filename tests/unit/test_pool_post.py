"""A pool manager that is slow in any way costs one thread, and that no longer than it may take."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import threading

import pytest

from llorch_serve.pool.post import Poster, read_url
from support.builders.certificates import make_certificates

PATIENCE_S = 20.0


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "llorch-callback"]


@contextlib.contextmanager
def manager(pieces, tls=None, pause_s=0.01):
    """A manager that sends ``pieces`` one by one to everyone who connects, for as long as the connection
    lasts.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve(client):
        with (
            contextlib.suppress(OSError),
            client,
            tls.wrap_socket(client, server_side=True) if tls is not None else client as talking,
        ):
            for piece in pieces():
                talking.sendall(piece)
                if over.wait(pause_s):
                    return

    def listen():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def dribbled_status():
    return itertools.chain([b"HTTP/1.1 200 O"], itertools.repeat(b"K"))


def dribbled_headers():
    return itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"a: b"))


def many_promises():
    return itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n")


def silence():
    return itertools.repeat(b"")


async def give_up_often(poster):
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await poster.post(b"{}", timeout_s=0.1)
        assert len(threads()) <= 1
    for thread in threads():
        await asyncio.to_thread(thread.join, PATIENCE_S)
    assert not threads()


@pytest.mark.parametrize("pieces", [dribbled_status, dribbled_headers, many_promises, silence])
def test_a_manager_that_dribbles_its_answer_holds_no_thread(pieces):
    with manager(pieces) as url:
        asyncio.run(give_up_often(Poster(read_url(url))))


@pytest.mark.parametrize("pieces", [dribbled_headers, silence])
def test_nor_over_tls(pieces, tmp_path, monkeypatch):
    made = make_certificates(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(made.server_cert, made.server_key)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.ca))
    with manager(pieces, tls) as url:
        asyncio.run(give_up_often(Poster(read_url(url))))


def test_nor_in_tls_handshake():
    with manager(silence) as url:
        asyncio.run(give_up_often(Poster(read_url(url.replace("http:", "https:")))))


def test_a_host_that_cannot_be_looked_up_holds_one_thread_and_is_not_connected_to_late(monkeypatch):
    gate, asked, connected = threading.Event(), [], []

    def hang(*_arguments, **_named):
        asked.append(1)
        assert gate.wait(PATIENCE_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 9))]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: connected.append(arguments))

    async def give_up():
        poster = Poster(read_url("http://manager:1/"))
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await poster.post(b"{}", timeout_s=0.05)
            assert len(threads()) == 1
        gate.set()
        await asyncio.to_thread(threads()[0].join, PATIENCE_S)

    asyncio.run(give_up())
    assert (len(asked), connected) == (1, [])
