"""The bridge between protobuf messages and the plain types of ``llorch_serve.requests``: answers, in parts
and whole.

``write_*`` turn what the generator gives into messages, on the worker's side; ``read_*`` do the reverse, on
the client's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from llorch_serve.engine.sequence import FinishReason
from llorch_serve.requests import Completion, GenerationUpdate, Timings, ToolCallDelta, whole_calls
from llorch_serve.rpc import worker_pb2 as pb
from llorch_serve.rpc.convert_logprobs import read_logprobs, write_logprobs

_REASON_TO_WIRE: Final = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: pb.FINISH_REASON_TOOL_CALLS,
}
_REASON_FROM_WIRE: Final = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}


def write_update(update: GenerationUpdate, *, first: bool) -> pb.GenerateStreamResponse:
    """Return one message of a stream; only the first one carries the request's id."""
    message = pb.GenerateStreamResponse(
        text=update.text,
        token_ids=update.token_ids,
        index=update.index,
        reasoning_text=update.reasoning,
    )
    if first:
        message.request_id = update.request_id
    if update.logprobs:
        message.logprobs.extend(write_logprobs(update.logprobs))
    if update.prompt_logprobs:
        message.prompt_logprobs.extend(write_logprobs(update.prompt_logprobs))
    if update.tool_calls:
        message.tool_calls.extend(_write_calls(update.tool_calls))
    if update.completion is not None:
        message.completion.CopyFrom(_write_completion(update.completion))
    return message


def read_update(
    request_id: str, message: pb.GenerateStreamResponse, *, open_answers: int = 1
) -> GenerationUpdate:
    """Return the update that one message of a stream stands for; open_answers: those that went on before
    it.
    """
    completion = _read_completion(message.completion) if message.HasField("completion") else None
    left = open_answers - (completion is not None)
    return GenerationUpdate(
        request_id,
        message.text,
        tuple(message.token_ids),
        completion,
        logprobs=read_logprobs(message.logprobs),
        index=message.index,
        open_answers=left,
        prompt_logprobs=read_logprobs(message.prompt_logprobs),
        reasoning=message.reasoning_text,
        tool_calls=_read_calls(message.tool_calls),
    )


def write_answers(request_id: str, answers: Sequence[GenerationUpdate]) -> pb.GenerateResponse:
    """Return whole answers, each as one update with its completion."""
    in_order = sorted(answers, key=lambda answer: answer.index)
    return pb.GenerateResponse(
        request_id=request_id,
        choices=[_write_choice(answer) for answer in in_order],
        prompt_logprobs=write_logprobs(in_order[0].prompt_logprobs),
    )


def _write_choice(answer: GenerationUpdate) -> pb.Choice:
    assert answer.completion is not None
    return pb.Choice(
        index=answer.index,
        text=answer.text,
        token_ids=answer.token_ids,
        completion=_write_completion(answer.completion),
        logprobs=write_logprobs(answer.logprobs),
        reasoning_text=answer.reasoning,
        tool_calls=_write_calls(whole_calls(answer.tool_calls)),
    )


def _write_calls(calls: Iterable[ToolCallDelta]) -> list[pb.ToolCallDelta]:
    return [
        pb.ToolCallDelta(
            index=call.index, id=call.id, name=call.name, arguments=call.arguments, broken=call.broken
        )
        for call in calls
    ]


def _read_calls(calls: Iterable[pb.ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    return tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments, call.broken) for call in calls)


def read_answers(message: pb.GenerateResponse) -> list[GenerationUpdate]:
    """Return whole answers, each as one update with its completion."""
    left = len(message.choices)
    return [
        GenerationUpdate(
            message.request_id,
            choice.text,
            tuple(choice.token_ids),
            _read_completion(choice.completion),
            logprobs=read_logprobs(choice.logprobs),
            index=choice.index,
            open_answers=left - place,
            prompt_logprobs=read_logprobs(message.prompt_logprobs) if place == 1 else (),
            reasoning=choice.reasoning_text,
            tool_calls=_read_calls(choice.tool_calls),
        )
        for place, choice in enumerate(message.choices, 1)
    ]


_USAGE_FIELDS: Final = tuple(field.name for field in pb.Usage.DESCRIPTOR.fields)


def _write_completion(completion: Completion) -> pb.Completion:
    timings, stop = completion.timings, completion.stop_logprobs
    return pb.Completion(
        finish_reason=_REASON_TO_WIRE[completion.reason],
        stop_matched=completion.stop_matched,
        usage=pb.Usage(**{name: getattr(completion, name) for name in _USAGE_FIELDS}),
        timings=pb.Timings(queue_s=timings.queue_s, prefill_s=timings.prefill_s, decode_s=timings.decode_s),
        seed=completion.seed,
        stop_logprobs=None if stop is None else write_logprobs([stop])[0],
    )


def _read_completion(message: pb.Completion) -> Completion:
    return Completion(
        # A reason that this client does not know came from a newer worker; the answer has ended all the same.
        reason=_REASON_FROM_WIRE.get(message.finish_reason, FinishReason.STOP),
        stop_matched=message.stop_matched if message.HasField("stop_matched") else None,
        **{name: getattr(message.usage, name) for name in _USAGE_FIELDS},
        seed=message.seed,
        timings=Timings(message.timings.queue_s, message.timings.prefill_s, message.timings.decode_s),
        stop_logprobs=read_logprobs([message.stop_logprobs])[0]
        if message.HasField("stop_logprobs")
        else None,
    )
