"""Random protobuf messages, from nothing but their descriptors: fields that make sense, edges of their types,
and bytes that are no message at all.
"""

from __future__ import annotations

import json
import random
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_MAX_DEPTH: Final = 6
_TEXTS: Final = (
    "", " ", "a", "Hello, world", "user", "assistant", "system", "tool", "developer", "\x00", "\x7f",
    "\U0001f642", "<|turn|>",
    "tiny", "default", "tool_use", "{}", "[]", "null", '{"type": "object"}', '{"a": [1, 2.5, null]}',
    '{"a": ', "(a|b)+", "((",
    "start: /a+/", "start: start", "[0-9]{1,1000000}", "a" * 300, "\u202e", "%s", "../../etc/passwd",
    json.dumps({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}),
    json.dumps({"add_generation_prompt": False, "x": {"y": [1]}}),
)  # fmt: skip
_WHOLE: Final = (
    0, 1, 2, 3, 4, 7, 16, 64, 127, 128, 511, 512, 2**15, 2**31 - 1, -1, -2, -(2**31), 2**32 - 1, 2**63 - 1,
    -(2**63),
)  # fmt: skip
_REAL: Final = (
    0.0, 1.0, 0.5, 2.0, -1.0, -0.0, 1e-45, 1e308, 1e-308, float("nan"), float("inf"), float("-inf"), 100.0,
)  # fmt: skip
# What a field takes, so that a message is not refused for one field where another was to be tried.
_FITTING: Final = {
    "temperature": (0.0, 0.7), "top_p": (0.9, 1.0), "min_p": (0.0, 0.1), "typical_p": (0.9,),
    "repetition_penalty": (1.1,),
    "presence_penalty": (0.5,), "frequency_penalty": (-0.5,), "top_k": (0, 5), "seed": (0, 7),
    "max_tokens": (0, 1, 5),
    "min_tokens": (0, 1), "n": (1, 2), "best_of": (2,), "logprobs": (0, 2), "prompt_logprobs": (0, 1),
    "repeat_last_n": (-1, 3),
    "priority": (0, 3), "model": ("tiny",), "role": ("user", "assistant", "system", "developer"),
    "client_id": ("a",),
    "stop": ("a", "\n"), "stop_token_ids": (5,), "ids": (1, 2, 3), "token_ids": (1, 2, 3),
    "regex": ("[a-z]+",),
    "json_schema": ('{"type": "integer"}',), "grammar": ("start: /a+/",), "arguments": ("{}",),
    "documents": ('{"text": "a"}',), "content_parts": ("a",), "template_arguments": ("{}",),
    "tools": ('{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}',),
    "key": (5,), "value": (1.5,),
}  # fmt: skip
# Without these, most messages would be refused for want of a prompt.
_NEEDED: Final = (
    "input", "request", "context", "messages", "role", "content", "continuations", "kind", "text",
)  # fmt: skip
_ALWAYS: Final = 0.97
_RARE: Final = {
    "fingerprint": 0.05,
    "model": 0.1,
    "template_name": 0.1,
    "content_parts": 0.1,
    "request_id": 0.2,
    "structured": 0.3,
}
_WHOLE_TYPES: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def random_message(
    kind: Descriptor, rng: random.Random, *, density: float | None = None, depth: int = 0
) -> Message:
    """Return a message. density: how likely each field is set, 0..1; None: drawn."""
    share = rng.choice((0.1, 0.3, 0.6, 0.95)) if density is None else density
    message = GetMessageClass(kind)()
    for field in kind.fields:
        group = field.containing_oneof
        if group is not None and len(group.fields) > 1:
            if field is group.fields[0] and rng.random() < (_ALWAYS if group.name in _NEEDED else share):
                _set(message, rng.choice(group.fields), rng, share, depth)
        elif rng.random() < (_ALWAYS if field.name in _NEEDED else share * _RARE.get(field.name, 1.0)):
            _set(message, field, rng, share, depth)
    return message


def random_bytes(message: Message, rng: random.Random) -> bytes:
    """Return a message as bytes, which now and then are broken."""
    raw = bytearray(message.SerializeToString())
    if rng.random() < 0.7 or not raw:
        return bytes(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(4):
            case 0 if at < len(raw):
                raw[at] = rng.randrange(256)
            case 1:
                del raw[at : at + rng.choice((1, 2, 10))]
            case 2:
                raw[at:at] = rng.randbytes(rng.choice((1, 3, 20)))
            case _:
                raw[at:at] = bytes(raw[: rng.choice((2, 10, 50))])
    return bytes(raw)


def _set(message: Message, field: FieldDescriptor, rng: random.Random, share: float, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        table = getattr(message, field.name)
        for _ in range(rng.choice((0, 1, 3))):
            table[_value(field.message_type.fields_by_name["key"], rng)] = _value(
                field.message_type.fields_by_name["value"], rng
            )
        return
    if field.message_type is not None:
        if depth >= _MAX_DEPTH:
            return
        count = rng.choice((1, 1, 2, 5)) if field.is_repeated else 1
        for _ in range(count):
            inner = random_message(field.message_type, rng, density=share, depth=depth + 1)
            if field.is_repeated:
                getattr(message, field.name).append(inner)
            else:
                getattr(message, field.name).CopyFrom(inner)
        return
    if field.is_repeated:
        getattr(message, field.name).extend(_value(field, rng) for _ in range(rng.choice((0, 1, 1, 3, 20))))
    else:
        setattr(message, field.name, _value(field, rng))


def _value(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.name in _FITTING and rng.random() < 0.9:
        return rng.choice(_FITTING[field.name])
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 20)))
        case FieldDescriptor.CPPTYPE_STRING:
            return "".join(rng.choices(_TEXTS, k=rng.choice((1, 1, 1, 2))))
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((*field.enum_type.values_by_number, 99))
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice(_REAL)
    low, high = _WHOLE_TYPES[field.cpp_type]
    return min(max(rng.choice(_WHOLE), low), high)
