"""What a measuring process is told and what it answers: one JSON task on stdin, JSON lines on stdout.

Imported by every peer's process too, so it needs the standard library alone. Speeds are computed here from
the times at which tokens arrived, so that every peer is measured by one definition, that of ``llorch bench``.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any


class ProtocolError(Exception):
    """A process said something else than the protocol allows; the message is one line."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a peer's process does.

    model: the file or folder that the engine loads. threads: for its arithmetic.
    prompts: token ids of each stream's prompt; the first n are used for n streams.
    new_tokens: greedy tokens of each stream, the first of which the prompt's computation gives; end tokens
        are ignored.
    streams: numbers of streams that start together. repeat: counted runs of each.
    warm_up: one run of each goes before them, which is not counted.
    filled: contexts hold the prompts before the clock starts, so that decoding alone is timed. Where an
        engine can copy a context, it computes the first prompt alone.
    cache: type of the KV cache, as the engine names it; empty: its default.
    logits_of: if it is not empty, nothing is timed; the logits at these ids go to ``logits_file`` as a
        float32 .npy array.
    text: if it is not empty, neither is done; the text of the first greedy token behind it is printed as soon
        as it is there.
    """

    model: str
    threads: int
    prompts: tuple[tuple[int, ...], ...] = ()
    new_tokens: int = 2
    streams: tuple[int, ...] = ()
    repeat: int = 1
    warm_up: bool = True
    filled: bool = False
    cache: str = ""
    logits_of: tuple[int, ...] = ()
    logits_file: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Speed of one engine at a number of streams that started together.

    weights: how the model is stored, for people. prompt_tokens, new_tokens: of each stream.
    prefill_tokens_per_s: all prompt tokens over the time until every stream has its first token; None where
        contexts were filled before.
    decode_tokens_per_s: all later tokens, of all streams together, over the time from there.
    peak_mib: most memory that the process has held so far; None where the system does not say.
    """

    engine: str
    version: str
    weights: str
    streams: int
    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float
    peak_mib: float | None = None


@dataclass(slots=True)
class Arrivals:
    """When tokens came, in seconds after the start: one list for each stream."""

    streams: int
    times: list[list[float]] = field(init=False)
    _start: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.times = [[] for _ in range(self.streams)]
        self._start = time.perf_counter()

    def mark(self, stream: int, count: int = 1) -> None:
        """Note that ``count`` tokens of a stream have just come."""
        self.times[stream] += [time.perf_counter() - self._start] * count


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that has loaded its model. run: does the work of a number of streams; one list of times for
    each.
    """

    name: str
    version: str
    weights: str
    run: Callable[[int], Arrivals]


def speeds(arrivals: Sequence[Sequence[float]], prompt_tokens: int) -> tuple[float, float]:
    """Return prefill and decode tokens per second of one run. Every stream must have a token."""
    all_started = max(times[0] for times in arrivals)
    end = max(times[-1] for times in arrivals)
    later = sum(moment > all_started for times in arrivals for moment in times)
    decode = later / (end - all_started) if end > all_started else 0.0
    return prompt_tokens * len(arrivals) / all_started, decode


def measure(engine: Engine, task: Task) -> Iterable[Measurement]:
    """Yield the median speeds at each number of streams."""
    for streams in task.streams:
        runs = []
        for index in range(task.repeat + task.warm_up):
            times = engine.run(streams).times
            short = min(len(stream) for stream in times)
            if short < task.new_tokens:
                raise ProtocolError(f"{engine.name} gave a stream {short} tokens of {task.new_tokens}")
            if index >= task.warm_up:
                runs.append(speeds(times, len(task.prompts[0])))
        yield Measurement(
            engine=engine.name,
            version=engine.version,
            weights=engine.weights,
            streams=streams,
            prompt_tokens=len(task.prompts[0]),
            new_tokens=task.new_tokens,
            prefill_tokens_per_s=None if task.filled else statistics.median(prefill for prefill, _ in runs),
            decode_tokens_per_s=statistics.median(decode for _, decode in runs),
            peak_mib=peak_mib(),
        )


def encode(value: Task | Measurement) -> str:
    """Return the line that says this, without its line break."""
    return json.dumps(asdict(value))


def parse_task(text: str) -> Task:
    """Read a task. Raises ProtocolError for anything else."""
    values = _object(text)
    _check_names(Task, values)
    values["prompts"] = tuple(tuple(prompt) for prompt in values["prompts"])
    return Task(**values | {name: tuple(values[name]) for name in ("streams", "logits_of")})


def parse_measurements(text: str) -> list[Measurement]:
    """Read a process's lines. Raises ProtocolError for a line that is no measurement, or if there is none."""
    found = [_measurement(line) for line in text.splitlines() if line.strip()]
    if not found:
        raise ProtocolError("the process ended well and printed no measurement")
    return found


def peak_mib() -> float | None:
    """Return the most memory that this process has held, in MiB; None where /proc does not say."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return int(status.read_text(encoding="ascii", errors="replace").split("VmHWM:")[1].split()[0]) / 2**10


def _measurement(line: str) -> Measurement:
    values = _object(line)
    _check_names(Measurement, values)
    for name in ("streams", "prompt_tokens", "new_tokens"):
        if type(values[name]) is not int or values[name] < 1:
            raise ProtocolError(
                f"{name} is {values[name]!r}; expected a whole number from 1 on: {line[:200]}"
            )
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        if name == "prefill_tokens_per_s" and values[name] is None:
            continue
        if not isinstance(values[name], int | float) or not values[name] > 0:
            raise ProtocolError(f"{name} is {values[name]!r}; expected a speed: {line[:200]}")
    return Measurement(**values)


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProtocolError(f"not a JSON object: {text[:200]!r}") from error
    if not isinstance(values, dict):
        raise ProtocolError(f"not a JSON object: {text[:200]!r}")
    return values


def _check_names(kind: type[Task | Measurement], values: dict[str, Any]) -> None:
    expected = {entry.name for entry in fields(kind)}
    if values.keys() != expected:
        odd = sorted(values.keys() ^ expected)
        raise ProtocolError(f"a {kind.__name__} has other fields than expected: {', '.join(odd)}")
