"""How a worker runs: composed, frozen, resolved before anything is started."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from llorch_serve.artifact.manifest import KvDtype
from llorch_serve.errors import UsageError
from llorch_serve.providers import ProviderChoice

AUTO: Final = "auto"  # a format that the model itself tells
DEFAULT_PREFILL_CHUNK: Final = 256  # tokens; smaller chunks lose prefill speed, larger ones gain none
MAX_NAME_CHARS: Final = 256  # of a model
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNITS: Final = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Where the stages of a model that is cut into stages run.

    devices: the number of each stage's device among those of the provider; empty: all on the provider's own.
    processes: each stage in a process of its own on this machine, with its share of the cores.
    lanes: groups of sequences whose calls are in different stages at once; None: as many as there are places
        that work at the same time, the processes or the devices.
    """

    devices: tuple[int, ...] = ()
    processes: bool = False
    lanes: int | None = None


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Runtime settings.

    threads: intra-op threads; None takes the CPUs that this process may use.
    slots: sequences that can be in the KV cache at once.
    max_context: tokens per slot; None takes the artifact's context length, or less if memory is short (said
        aloud).
    kv_cache_bytes: memory that the KV cache may grow to; None takes a share of what is free.
    kv_dtype: what the KV cache holds; None takes the artifact's own choice.
    single_graph: run prompts on the graph that decodes too, which is slower and saves the memory of another.
    batch_invariant: run every call on an even number of rows, so that 4-bit weights too give a sequence the
        same bits whatever else is running.
    huge_pages: move the loaded weights into huge pages, which takes some seconds for a large model; None:
        where the system can.
    share_weights: map packed weights from a file of the user's cache, which other processes map too.
    provider: what runs the graph.
    stages: where its stages run, if it is cut into stages.
    """

    threads: int | None = None
    slots: int = 8
    max_context: int | None = None
    kv_cache_bytes: int | None = None
    kv_dtype: KvDtype | None = None
    single_graph: bool = False
    batch_invariant: bool = False
    huge_pages: bool | None = False
    share_weights: bool = False
    provider: ProviderChoice = field(default_factory=ProviderChoice)
    stages: StageChoice = StageChoice()


class CacheSharing(enum.Enum):
    """Whose requests share cached prefixes and compiled grammars, and so may tell by the time, or by
    ``cached_tokens``, what was sent.
    """

    CALLER = "caller"  # one caller's; all together where the worker does not know its callers
    CLIENT = "client"  # one client_id's of one caller, or one connection's where there is none
    ALL = "all"  # everybody's


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Scheduling settings.

    prefill_chunk: most prompt tokens in one step.
    max_waiting: requests that may queue for a slot; further ones are refused.
    max_waiting_tokens: tokens that the prompts of those may have together, and as many while their grammars
        are compiled; one request may always wait alone. None: as many as the KV cache may hold, at least
        DEFAULT_MOST_TOKENS.
    prefix_cache: start a request from the longest prefix of its prompt that the cache holds.
    cache_sharing: whose requests share cached prefixes and compiled grammars.
    strict_reuse: of that, only what prefill calls computed, so that the answer is the same bits as without.
    lookup: most tokens guessed at a time from the sequence's own earlier text; 0: none.
    draft: folder of a smaller artifact of the same tokenizer that guesses tokens; None: none does.
    kv_cache: False recomputes the whole sequence for every token (to check the cache, not to serve).
    tool_format, reasoning_format: how calls and thoughts are read out of answers to chats: the name of a
        format, ``auto`` (the chat template's) or ``none``.
    rank_format: how documents are ranked: ``qwen3``, ``auto`` (where the model's name says that it ranks) or
        ``none``.
    served_names: what clients may call the model beside its own id.
    """

    session: SessionConfig = field(default_factory=SessionConfig)
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    max_waiting: int = 1024
    max_waiting_tokens: int | None = None
    prefix_cache: bool = True
    cache_sharing: CacheSharing = CacheSharing.CALLER
    strict_reuse: bool = False
    lookup: int = 0
    draft: Path | None = None
    kv_cache: bool = True
    tool_format: str = AUTO
    reasoning_format: str = AUTO
    rank_format: str = AUTO
    served_names: tuple[str, ...] = ()

    @property
    def guesses(self) -> str | None:
        """The flag that asks for guesses, with its value; None where none are made."""
        if self.draft is not None:
            return f"--draft {self.draft}"
        return f"--lookup {self.lookup}" if self.lookup else None


def check_guesses(config: EngineConfig) -> None:
    """Raise UsageError for guesses that something else which is asked for leaves no room for."""
    if config.guesses is None:
        return
    flag = config.guesses.split()[0]
    if config.draft is not None and config.lookup:
        raise UsageError("--draft does not go with --lookup, as guesses come from one of them; leave one out")
    if config.session.batch_invariant:
        raise UsageError(
            f"--batch-invariant does not go with {flag}, whose checks depend on how many sequences are "
            "running; leave one of them out"
        )
    if not config.kv_cache:
        raise UsageError(f"{flag} has no effect with --no-kv-cache; leave one of them out")


def read_size(flag: str, value: str | None) -> int | None:
    """Return the bytes that a size like ``2GiB``, ``500MB`` or ``1048576`` stands for. Raises UsageError."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip())
    size = 0 if match is None else int(float(match[1]) * _UNITS[(match[2] or "").upper()])
    if size < 1:
        raise UsageError(f"{flag} is {value!r}; expected a number of bytes, like 2GiB, 500MiB or 1000000000")
    return size


def read_names(flag: str, given: Iterable[str]) -> tuple[str, ...]:
    """Return what clients may call a model, each name once. Raises UsageError for one that is empty, or
    long.
    """
    names = tuple(dict.fromkeys(given))
    for name in names:
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
            raise UsageError(
                f"{flag} is {name[:100]!r}; expected 1 to {MAX_NAME_CHARS} characters that can be printed, "
                "without spaces around them"
            )
    return names
