"""A session without a model: a language model made of hashes, whose next logits depend on every token before
them.

It keeps a cache for each slot as the real session does: a position holds a digest of its token, its place and
all digests below it, and is read again by every later token. A wrong position, a lost or doubled token, a
slot that still holds another sequence, or a missing move changes the digests and therefore the answer.
:func:`next_logits` is the
oracle: the same model from the tokens alone, without any cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from llorch_serve.cache.kv_cache import KvCapacity
from llorch_serve.engine.capabilities import FULL, Capabilities
from llorch_serve.engine.lookup import PromptLookup
from llorch_serve.engine.sequence import Limits, Ownership
from llorch_serve.engine.sequence import Sequence as TokenSequence
from llorch_serve.engine.shared_prompt import SharedPrompt
from llorch_serve.providers import Placement
from llorch_serve.sampling.params import ResolvedSampling
from llorch_serve.sampling.prompt_scores import PromptScores
from llorch_serve.sampling.sampler import SamplingRow, sample_batch

Logits = npt.NDArray[np.float32]
Rule = Callable[[tuple[int, ...]], int | None]
"""Takes all tokens so far; returns the token that must come next, or None to leave it to the hashes."""

GREEDY = ResolvedSampling(
    temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, min_tokens=0, seed=0
)
NOBODYS = Ownership()
_UNWRITTEN = b"\xee" * 8


def _digest(below: Sequence[bytes], token: int, position: int) -> bytes:
    content = b"".join(below) + token.to_bytes(8, "little") + position.to_bytes(8, "little")
    return hashlib.blake2b(content, digest_size=8).digest()


def _logits_of(digest: bytes, vocab_size: int) -> Logits:
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return generator.standard_normal(vocab_size, dtype=np.float32)


def next_logits(tokens: Sequence[int], vocab_size: int, rule: Rule | None = None) -> Logits:
    """Return the logits after ``tokens``, computed from nothing but them."""
    digests: list[bytes] = []
    for position, token in enumerate(tokens):
        digests.append(_digest(digests, token, position))
    logits = _logits_of(digests[-1], vocab_size)
    forced = None if rule is None else rule(tuple(tokens))
    if forced is not None:
        logits[forced] = 100.0
    return logits


def continuation(
    prompt: Sequence[int],
    count: int,
    vocab_size: int,
    *,
    stop_ids: Sequence[int] = (),
    params: ResolvedSampling = GREEDY,
    rule: Rule | None = None,
) -> list[int]:
    """Return what a sequence must generate: at most ``count`` tokens, up to and without the first stop
    token.
    """
    row = SamplingRow.begin(params, prompt_ids=prompt, stop_ids=stop_ids)
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        (token,) = sample_batch(next_logits(tokens, vocab_size, rule)[None], [row])
        assert isinstance(token, int), token
        if token in stop_ids:
            break
        tokens.append(token)
        row.append(token)
    return tokens[len(prompt) :]


def sequence_of(
    name: str,
    prompt: Sequence[int],
    count: int,
    *,
    stop_ids: Sequence[int] = (),
    ownership: Ownership = NOBODYS,
    lookup: int = 0,
    shared: SharedPrompt | None = None,
    prompt_scores: PromptScores | None = None,
    **params: Any,
) -> TokenSequence:
    """Return a sequence of this prompt that may generate ``count`` tokens; greedy unless ``params`` say
    otherwise. lookup: most tokens in a draft.
    """
    row = SamplingRow.begin(replace(GREEDY, **params), prompt_ids=prompt, stop_ids=stop_ids)
    return TokenSequence(
        name,
        list(prompt),
        len(prompt),
        Limits(count, frozenset(stop_ids)),
        row,
        ownership=ownership,
        lookup=PromptLookup(prompt, max_draft=lookup) if lookup else None,
        shared=shared,
        prompt_scores=prompt_scores,
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One model call. prefill, verify: a single slot and its chunk. decode: one token for each slot from 0.

    tokens: for each slot of the call, what its cache stands for after the call.
    """

    kind: str
    slots: tuple[int, ...]
    token_ids: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class FakeSession:
    """Implements :class:`llorch_serve.engine.runner.Session`, and what a worker asks of a real one.

    rule: forces tokens, so that a test can write the answer.
    before_call: called with each call before it is carried out; may block or raise.
    edit: called with each call and its logits, which it may change in place.
    kinds: for each slot and position, the kind of call that wrote it.
    """

    slots: int = 4
    context: int = 64
    vocab_size: int = 32
    rule: Rule | None = None
    before_call: Callable[[Call], None] = lambda _call: None
    edit: Callable[[Call, Logits], None] = lambda _call, _logits: None
    calls: list[Call] = field(default_factory=list)
    moves: list[tuple[int, int, int]] = field(default_factory=list)
    swaps: list[tuple[int, int, int]] = field(default_factory=list)
    releases: list[tuple[int, int]] = field(default_factory=list)
    kinds: list[list[str]] = field(init=False)
    capabilities: Capabilities = FULL
    _cache: list[list[bytes]] = field(init=False)
    _tokens: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self._cache = [[_UNWRITTEN] * self.context for _ in range(self.slots)]
        self._tokens = [[-1] * self.context for _ in range(self.slots)]
        self.kinds = [[""] * self.context for _ in range(self.slots)]

    @property
    def capacity(self) -> KvCapacity:
        return KvCapacity(self.slots, self.context, bytes_per_token=8, budget=self.slots * self.context)

    @property
    def placement(self) -> Placement:
        return Placement("FakeExecutionProvider", 1.0)

    def prefill(
        self, slot: int, token_ids: Sequence[int], start: int, wanted: Sequence[int] | None = None
    ) -> Logits:
        rows = [len(token_ids) - 1] if wanted is None else list(wanted)
        return self._chunk("prefill", slot, token_ids, start, rows)

    def verify(self, slot: int, token_ids: Sequence[int], start: int) -> Logits:
        return self._chunk("verify", slot, token_ids, start, range(len(token_ids)))

    def _chunk(
        self, kind: str, slot: int, token_ids: Sequence[int], start: int, rows: Sequence[int]
    ) -> Logits:
        assert token_ids
        end = start + len(token_ids)
        assert 0 <= start < end <= self.context, "positions outside the cache"
        after = (*self._tokens[slot][:start], *token_ids)
        call = Call(kind, (slot,), tuple(token_ids), (after,))
        self.calls.append(call)
        self.before_call(call)
        for position, token in enumerate(token_ids, start):
            self._write(slot, position, token, kind)
        logits = np.empty((len(rows), self.vocab_size), np.float32)
        for row, index in enumerate(rows):
            logits[row] = self._read(slot, start + index + 1)
        self.edit(call, logits)
        return logits

    def decode(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Logits:
        count = len(token_ids)
        assert 0 < count == len(lengths) <= self.slots
        assert all(1 <= length <= self.context for length in lengths), "positions outside the cache"
        pairs = enumerate(zip(token_ids, lengths, strict=True))
        after = tuple((*self._tokens[slot][: length - 1], token) for slot, (token, length) in pairs)
        call = Call("decode", tuple(range(count)), tuple(token_ids), after)
        self.calls.append(call)
        self.before_call(call)
        logits = np.empty((count, self.vocab_size), np.float32)
        for slot, (token, length) in enumerate(zip(token_ids, lengths, strict=True)):
            self._write(slot, length - 1, token, "decode")
            logits[slot] = self._read(slot, length)
        self.edit(call, logits)
        return logits

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        assert source != target
        self.moves.append((source, target, tokens))
        for rows in self._all_rows():
            rows[target][:tokens] = rows[source][:tokens]

    def swap_slots(self, first: int, second: int, tokens: int) -> None:
        assert first != second
        self.swaps.append((first, second, tokens))
        for rows in self._all_rows():
            kept = rows[first][:tokens]
            rows[first][:tokens] = rows[second][:tokens]
            rows[second][:tokens] = kept

    def release_slot(self, slot: int, keep: int) -> None:
        self.releases.append((slot, keep))
        self._cache[slot][keep:] = [_UNWRITTEN] * (self.context - keep)
        self._tokens[slot][keep:] = [-1] * (self.context - keep)

    def _all_rows(self) -> tuple[list[list[Any]], ...]:
        return self._cache, self._tokens, self.kinds

    def _write(self, slot: int, position: int, token: int, kind: str) -> None:
        assert 0 <= token < self.vocab_size
        self._cache[slot][position] = _digest(self._cache[slot][:position], token, position)
        self._tokens[slot][position] = token
        self.kinds[slot][position] = kind

    def _read(self, slot: int, length: int) -> Logits:
        # The last digest depends on all below it as they were read when it was written.
        logits = _logits_of(self._cache[slot][length - 1], self.vocab_size)
        forced = None if self.rule is None else self.rule(tuple(self._tokens[slot][:length]))
        if forced is not None:
            logits[forced] = 100.0
        return logits
