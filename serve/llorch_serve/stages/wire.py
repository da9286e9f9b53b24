"""Calls and answers of a stage as bytes: a header that msgspec reads, then one array as it lies in memory.

Nothing that is read here can run code: the header has a fixed schema, and the array's type is one of a few.
"""

from __future__ import annotations

import math
import struct
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from llorch_serve.engine.load import StageTimes
from llorch_serve.engine.plan import SlotCopy, SlotEdit, SlotRelease, SlotSwap
from llorch_serve.errors import LlorchError, NonFiniteLogitsError, ProviderError, ResourceError
from llorch_serve.runtime.bound_graph import Logits
from llorch_serve.runtime.stage_graph import Rows
from llorch_serve.stages.calls import StageCall
from llorch_serve.stages.shared_logits import beginning, lies_in

Buffers: TypeAlias = list[bytes | memoryview]
"""A message in parts, which are sent one behind the other."""

ElementType = Literal["float32", "float16", "uint16"]
_ALIGNMENT: Final = 64
_HEADER_LENGTH: Final = struct.Struct("<I")
_TYPES: Final[dict[ElementType, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "uint16": np.dtype(np.uint16),
}
_NAMES: Final = {dtype: name for name, dtype in _TYPES.items()}  # numpy's own ``dtype.name`` takes long
_NOTHING: Final = np.zeros((0, 0, 0), np.float32)


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag=True):
    """shape, dtype: of the array behind the header."""

    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=3)] = (0,)
    dtype: ElementType = "float32"


class Run(_Header, frozen=True, kw_only=True):
    """Asks for a call. The fields are those of :class:`llorch_serve.stages.calls.StageCall`.

    times: of the stages that have handed the call on.
    """

    prompt: bool
    first: int
    lengths: tuple[int, ...]
    token_ids: tuple[int, ...]
    wanted: tuple[int, ...]
    has_rows: bool
    times: tuple[StageTimes, ...] = ()


class Copy(_Header, frozen=True, kw_only=True):
    """Asks for :class:`llorch_serve.engine.plan.SlotCopy`."""

    source: int
    target: int
    tokens: int


class Swap(_Header, frozen=True, kw_only=True):
    """Asks for :class:`llorch_serve.engine.plan.SlotSwap`."""

    first: int
    second: int
    tokens: int


class Release(_Header, frozen=True, kw_only=True):
    """Asks for :class:`llorch_serve.engine.plan.SlotRelease`."""

    slot: int
    keep: int


class Done(_Header, frozen=True, kw_only=True):
    """Answers with an array. times: of all stages that the call went through, the one that answers last.

    shared: the array is not in the message but at the beginning of the memory that both sides have.
    """

    times: tuple[StageTimes, ...] = ()
    shared: bool = False


class Failed(_Header, frozen=True, kw_only=True):
    """Answers that a call failed. kind: the error's class."""

    kind: Literal["ProviderError", "ResourceError", "NonFiniteLogitsError", "MemoryError", "other"]
    message: str


Question: TypeAlias = Run | Copy | Swap | Release | Failed
"""Failed: of a stage before, instead of the call that it would have handed on."""
Answer: TypeAlias = Done | Failed
_encoder: Final = msgspec.msgpack.Encoder()
_questions: Final = msgspec.msgpack.Decoder(Question)
_answers: Final = msgspec.msgpack.Decoder(Answer)


def pack(header: Question | Answer, rows: Rows | None = None) -> Buffers:
    """Return a message. rows: the array that the header tells the shape of."""
    head = _encoder.encode(header)
    used = _HEADER_LENGTH.size + len(head)
    start = _HEADER_LENGTH.pack(len(head)) + head + bytes(-used % _ALIGNMENT)
    if rows is None or not rows.size:
        return [start]
    return [start, np.ascontiguousarray(rows).data.cast("B")]


def unpack_question(message: memoryview) -> tuple[Question, Rows]:
    """Read a question and its array, which shares the message's memory. Raises ValueError if it is none."""
    head, rest = _split(message)
    header: Question = _questions.decode(head)
    return header, _array(header, rest)


def unpack_answer(message: memoryview, memory: Logits | None = None) -> tuple[Answer, Rows]:
    """Read an answer and its array, which shares the message's memory, or is in ``memory`` where the answer
    says so. Raises ValueError if it is none.
    """
    head, rest = _split(message)
    header: Answer = _answers.decode(head)
    if isinstance(header, Done) and header.shared:
        if memory is None:
            raise ValueError("an array in shared memory, of which there is none")
        return header, beginning(memory, header.shape)
    return header, _array(header, rest)


def _split(message: memoryview) -> tuple[memoryview, memoryview]:
    if len(message) < _HEADER_LENGTH.size:
        raise ValueError(f"a message of {len(message)} bytes has no header")
    (length,) = _HEADER_LENGTH.unpack_from(message)
    end = _HEADER_LENGTH.size + length
    if end > len(message):
        raise ValueError(f"a header of {length} bytes in a message of {len(message)}")
    return message[_HEADER_LENGTH.size : end], message[end + (-end % _ALIGNMENT) :]


def _array(header: Question | Answer, data: memoryview) -> Rows:
    dtype = _TYPES[header.dtype]
    expected = math.prod(header.shape) * dtype.itemsize
    if len(data) != expected:
        raise ValueError(f"{len(data)} bytes for an array {list(header.shape)} of {header.dtype}")
    return np.frombuffer(data, dtype).reshape(header.shape)


def ask_run(call: StageCall, times: tuple[StageTimes, ...] = ()) -> Buffers:
    """Return the message that asks for a call. times: of the stages that hand it on."""
    rows = _NOTHING if call.rows is None else call.rows
    header = Run(
        prompt=call.prompt,
        first=call.first,
        lengths=tuple(call.lengths),
        token_ids=tuple(call.token_ids),
        wanted=tuple(call.wanted),
        has_rows=call.rows is not None,
        times=times,
        shape=rows.shape,
        dtype=_element(rows),
    )
    return pack(header, rows)


def ask_edit(edit: SlotEdit) -> Buffers:
    """Return the message that asks for an edit of slots."""
    match edit:
        case SlotCopy(source, target, tokens):
            return pack(Copy(source=source, target=target, tokens=tokens))
        case SlotSwap(first, second, tokens):
            return pack(Swap(first=first, second=second, tokens=tokens))
        case SlotRelease(slot, keep):
            return pack(Release(slot=slot, keep=keep))


def asked_call(header: Run, rows: Rows) -> StageCall:
    """Return the call that a message asks for."""
    taken = rows if header.has_rows else None
    return StageCall(header.prompt, header.first, header.lengths, header.token_ids, header.wanted, taken)


def asked_edit(header: Copy | Swap | Release) -> SlotEdit:
    """Return the edit that a message asks for."""
    match header:
        case Copy(source=source, target=target, tokens=tokens):
            return SlotCopy(source, target, tokens)
        case Swap(first=first, second=second, tokens=tokens):
            return SlotSwap(first, second, tokens)
        case Release(slot=slot, keep=keep):
            return SlotRelease(slot, keep)


def done(rows: Rows, memory: Logits | None = None, times: tuple[StageTimes, ...] = ()) -> Buffers:
    """Return the answer with an array, which is left where it is if it lies in shared ``memory``; ``times``
    are those of :class:`Done`.
    """
    shared = lies_in(rows, memory)
    header = Done(shape=rows.shape, dtype=_element(rows), shared=shared, times=times)
    return pack(header, None if shared else rows)


_KINDS: Final[dict[str, type[Exception]]] = {
    "ProviderError": ProviderError,
    "ResourceError": ResourceError,
    "NonFiniteLogitsError": NonFiniteLogitsError,
    "MemoryError": MemoryError,
}


def failed(error: Exception) -> Buffers:
    """Return the answer to a question that failed."""
    kind: Any = next((name for name, made in _KINDS.items() if isinstance(error, made)), "other")
    said = str(error) if isinstance(error, LlorchError) else f"{type(error).__name__}: {error}"
    return pack(Failed(kind=kind, message=said[:2000]))


def error_of(answer: Failed) -> Exception:
    """Return the error that an answer tells of; of a kind that a session does not raise, RuntimeError."""
    return _KINDS.get(answer.kind, RuntimeError)(answer.message)


def _element(rows: Rows) -> ElementType:
    return _NAMES[rows.dtype]
