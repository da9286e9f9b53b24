"""Calls and answers of a stage as bytes: what goes in comes out, and what is no message is refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest

from llorch_serve.engine.plan import SlotCopy, SlotEdit, SlotRelease, SlotSwap
from llorch_serve.errors import NonFiniteLogitsError, ProviderError, ResourceError
from llorch_serve.stages import wire
from llorch_serve.stages.calls import StageCall
from llorch_serve.stages.framing import MAX_MESSAGE, Messages


def joined(parts: wire.Buffers) -> memoryview:
    return memoryview(b"".join(parts))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize("shape", [(2, 5, 16), (1, 0, 16), None])
def test_a_call_comes_out_as_it_went_in(dtype: type[np.generic], shape: tuple[int, ...] | None) -> None:
    rows = None if shape is None else np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    call = StageCall(True, 3, [40], range(7, 12), (0, 4), rows)
    header, array = wire.unpack_question(joined(wire.ask_run(call)))
    assert isinstance(header, wire.Run)
    found = wire.asked_call(header, array)
    assert (found.prompt, found.first, tuple(found.lengths)) == (True, 3, (40,))
    assert (tuple(found.token_ids), tuple(found.wanted)) == ((7, 8, 9, 10, 11), (0, 4))
    if rows is None:
        assert found.rows is None
    else:
        assert found.rows is not None
        assert found.rows.dtype == rows.dtype
        np.testing.assert_array_equal(found.rows, rows)


def test_rows_that_do_not_lie_together_are_sent_in_their_order() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(3, 2, 4).transpose(1, 0, 2)
    _, found = wire.unpack_answer(joined(wire.done(rows)))
    np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("edit", [SlotCopy(1, 2, 30), SlotSwap(0, 3, 7), SlotRelease(2, 16)])
def test_an_edit_comes_out_as_it_went_in(edit: SlotEdit) -> None:
    header, _ = wire.unpack_question(joined(wire.ask_edit(edit)))
    assert not isinstance(header, wire.Run)
    assert wire.asked_edit(header) == edit


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ProviderError("the runtime failed"), ProviderError),
        (ResourceError("no memory"), ResourceError),
        (NonFiniteLogitsError("NaN"), NonFiniteLogitsError),
        (MemoryError(), MemoryError),
        (KeyError("odd"), RuntimeError),
    ],
)
def test_an_error_is_of_the_same_class_on_the_other_side(error: Exception, kind: type[Exception]) -> None:
    header, _ = wire.unpack_answer(joined(wire.failed(error)))
    assert isinstance(header, wire.Failed)
    found = wire.error_of(header)
    assert type(found) is kind
    if isinstance(error, ProviderError):
        assert str(found) == "the runtime failed"


CALL = wire.ask_run(StageCall(False, 0, (1,), (5,), (0,), np.ones((1, 1, 4), np.float32)))
BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda _: b"",
    "half a length": lambda data: data[:2],
    "half a header": lambda data: data[:20],
    "too few rows": lambda data: data[:-1],
    "too many rows": lambda data: data + b"\0",
    "no header": lambda data: data[:4] + bytes(len(data) - 4),
    "another question": lambda data: data.replace(b"Run", b"Ran"),
    "another type": lambda data: data.replace(b"float32", b"float64"),
    "an object": lambda data: data.replace(b"float32", b"objects"),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_what_is_no_message_is_refused(broken: Callable[[bytes], bytes]) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):  # msgspec's errors are ones too
        wire.unpack_question(memoryview(broken(bytes(joined(CALL)))))


def ends() -> tuple[Messages, Messages]:
    one, other = socket.socketpair()
    return Messages(one), Messages(other)


def test_messages_of_any_size_come_whole_and_in_order() -> None:
    one, other = ends()
    sent = [[b""], [b"a" * 10, memoryview(b"b" * 3_000_000), b"", b"c"], [b"d"] * 40]
    sender = threading.Thread(target=lambda: [one.send(parts) for parts in sent])
    sender.start()
    for parts in sent:
        message = other.receive()
        assert message is not None
        assert bytes(message) == b"".join(parts)
    sender.join()
    one.close()
    assert other.receive() is None
    other.close()


def test_who_waits_learns_that_an_end_is_closed() -> None:
    one, other = ends()
    found: list[memoryview | None] = []
    waiting = threading.Thread(target=lambda: found.append(one.receive()))
    waiting.start()
    one.close()
    waiting.join(20)
    assert found == [None]
    with pytest.raises(BrokenPipeError):
        other.send([bytes(2**20)])
    other.close()


def test_a_length_that_no_message_has_is_refused() -> None:
    one, other = ends()
    one._socket.sendall((MAX_MESSAGE + 1).to_bytes(8, "little"))
    with pytest.raises(ValueError, match=f"a message of {MAX_MESSAGE + 1} bytes"):
        other.receive()
    one.close()
    other.close()
