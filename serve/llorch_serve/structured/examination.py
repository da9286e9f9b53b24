"""The process that tries grammars before the worker compiles them: ``python -m
llorch_serve.structured.examination``.

Input, a line of JSON each: first the vocabulary's size and special tokens and the most memory, then grammars.
Output, a line of JSON for each line: why the grammar was refused, or null, and the bytes of memory that it
takes. A grammar that takes too long, too much memory, or that breaks the library takes this process with it
and nothing else; ``examiner.py`` is the other end.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO, ClassVar, Final

import msgspec
import psutil

from llorch_serve.structured.limits import parser_limits

_MOST_TOLD: Final = 4096  # characters of a refusal, which may quote the whole grammar
_STACK_BYTES: Final = (
    2**20
)  # far less than the worker's threads have: what is deep enough to break them breaks here


class _Bytes:
    """A tokenizer of single bytes, with the model's special tokens where they belong."""

    def __init__(self, size: int, special: dict[int, str]) -> None:
        plain = [id_ for id_ in range(size + 256) if id_ not in special][:256]
        end = max(size, plain[-1] + 1)
        self.tokens = [b""] * end + [b"<end>"]
        for byte, id_ in enumerate(plain):
            self.tokens[id_] = bytes([byte])
        for id_, text in special.items():
            self.tokens[id_] = text.encode()
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids = [*special, end]
        self._plain = plain

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._plain[byte] for byte in data]


def answer(source: BinaryIO, sink: BinaryIO) -> None:
    """Examine grammars until ``source`` ends."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    size, special, limit_bytes = msgspec.json.decode(source.readline(), type=tuple[int, dict[int, str], int])
    tokens = _Bytes(size, special)
    trie = LLTokenizer(TokenizerWrapper(tokens), n_vocab=len(tokens.tokens), slices=[])
    _limit_memory(limit_bytes)
    used = _memory()
    _tell(sink, None, 0)
    for line in source:
        grammar, before = msgspec.json.decode(line, type=str), used()
        matcher = LLMatcher(trie, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        _tell(sink, matcher.get_error()[:_MOST_TOLD] or None, max(used() - before, 0))
        del matcher


def _tell(sink: BinaryIO, refusal: str | None, size: int) -> None:
    sink.write(msgspec.json.encode((refusal, size)) + b"\n")
    sink.flush()


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _memory() -> Callable[[], int]:
    """Return what tells the bytes in use: of the heap with glibc, else of the process, which then counts no
    memory used again.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        process = psutil.Process()
        return lambda: int(process.memory_info().rss)
    mallinfo.restype = _MallocInfo

    def in_use() -> int:
        info = mallinfo()
        return int(info.uordblks + info.hblkhd)

    return in_use


def _limit_memory(limit_bytes: int) -> None:
    if sys.platform != "win32":  # which has no such limit; there the time alone bounds it
        import resource

        most = psutil.Process().memory_info().vms + limit_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Examine what comes over stdin, on a thread with a small stack."""
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=answer, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
