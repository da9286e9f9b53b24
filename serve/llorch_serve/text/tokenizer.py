"""Between text and token ids: :class:`Tokenizer` for whole texts, :class:`TextStream` for an answer as it
grows.

tokenizer.json comes from the artifact folder; ids go to the engine, and text goes back to the caller.

``tokenizers.decoders.DecodeStream`` is not used. On byte-fallback tokenizers it raises ("Invalid prefix
encountered") or emits text that the whole decode does not contain, because a run of byte tokens is valid or
invalid as a whole; it also has no way to flush, and decodes ever longer windows while bytes stay invalid.
TextStream decodes a window of few tokens with the tokenizer's own decoder, and keeps this rule: joined pieces
equal the decode of all ids, whenever the stream ends. A token costs the same however long the answer or a run
of byte tokens has become; a run is decoded whole once, where it ends.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import tokenizers

from llorch_serve.errors import ArtifactError, FieldViolation, InvalidRequestError, LibraryPanicError
from llorch_serve.text.stops import StopMatcher, ThoughtMarks
from llorch_serve.text.thread_pool import leave_threads_alone
from llorch_serve.text.token_bytes import TokenBytes, decoder_rules, fallback_byte
from llorch_serve.text.tokenizer_library import encoded, read_tokenizer, rust_call

if TYPE_CHECKING:
    from llorch_serve.text.control_tokens import ControlTokenGuard

MAX_TOKENIZER_BYTES = 128 * 2**20
REPLACEMENT = "\ufffd"

SMALL_BYTES: Final = 2**18
"""A text of so many bytes is encoded at once: it has no more tokens than bytes, and those are made into
Python's numbers, and freed, within some ten milliseconds, during which no other thread runs.
"""
PIECE_CHARS: Final = 2**15
"""What is encoded at a time to find out whether a longer text has too many tokens; few enough to be freed in
no time.
"""
MANY_IDS: Final = 64
"""From so many on, ids are decoded without the interpreter's lock; for fewer, giving it away costs more than
it gains.
"""


class Tokenizer:
    """A tokenizer.json, without padding or truncation whatever the file says. Safe to use from many
    threads.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        leave_threads_alone()
        self._inner = inner
        with rust_call:
            inner.no_padding()
            inner.no_truncation()
            added = inner.get_added_tokens_decoder()
            vocabulary = inner.get_vocab(with_added_tokens=True)
            rules = decoder_rules(inner)
        self._special = {id_: token.content for id_, token in added.items() if token.special}
        # The bytes of tokens <0x00>..<0xFF> by id, where the decoder turns runs of them into characters.
        self.byte_values = _byte_values(rules, vocabulary)
        # One more than the largest id.
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        # Ids below it that stand for no token.
        self.unused_ids = _unused_ids(inner, vocabulary, self.vocab_size)
        # Most characters that one token can stand for.
        self.longest_token = max(map(len, vocabulary), default=1)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a tokenizer.json. Raises ArtifactError if it is missing, too large or damaged."""
        try:
            size = path.stat().st_size
            if size > MAX_TOKENIZER_BYTES:
                raise ArtifactError(
                    f"{path} has {size} bytes; expected at most {MAX_TOKENIZER_BYTES}. Export the model "
                    f"again."
                )
            data = path.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"{path} cannot be read ({error.strerror}); expected a tokenizer.json. Export the model "
                f"again."
            ) from error
        return cls.from_json(data, origin=str(path))

    @classmethod
    def from_json(cls, data: bytes, *, origin: str) -> Tokenizer:
        """Build a tokenizer from the content of a tokenizer.json; ``origin`` names it in errors
        (ArtifactError).
        """
        try:
            tokenizer = cls(read_tokenizer(data, origin=origin))
        except LibraryPanicError as error:
            raise ArtifactError(
                f"{origin} is not a usable tokenizer.json: {error}. Export the model again."
            ) from error
        if tokenizer.vocab_size == 0:
            raise ArtifactError(f"{origin} has an empty vocabulary; expected tokens. Export the model again.")
        return tokenizer

    @cached_property
    def unknown_id(self) -> int | None:
        """The id that stands for text the vocabulary lacks, or None if there is no such id."""
        with rust_call:
            token = msgspec.json.decode(self._inner.to_str()).get("model", {}).get("unk_token")
            return None if token is None else self._inner.token_to_id(token)

    def with_special_token(self, content: str) -> tuple[str, int]:
        """Return tokenizer.json's text with one special token more, and that token's id."""
        with rust_call:
            copy = tokenizers.Tokenizer.from_str(self._inner.to_str())
            copy.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])
            id_ = copy.token_to_id(content)
            assert id_ is not None
            return copy.to_str(), id_

    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of every token, added ones included."""
        with rust_call:
            return self._inner.get_vocab(with_added_tokens=True)

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """The tokens that control the model instead of standing for text, by id."""
        return self._special

    def encode(
        self, text: str, add_special_tokens: bool, *, field: str = "input.text", most: int | None = None
    ) -> tuple[int, ...]:
        """Return the ids of a text. Special tokens that it spells out become control tokens. Other threads
        run meanwhile.

        add_special_tokens: let tokenizer.json's post-processor add its tokens (BOS).
        field: names the text in an error. Raises InvalidRequestError for lone surrogates, and
            LibraryPanicError as all methods do.
        most: see :meth:`check_fits`, which comes first; None: it does not.
        """
        check_text(text, field)
        if most is not None:
            self.check_fits(text, most, field=field)
        return tuple(encoded(self._inner, text, add_special_tokens=add_special_tokens, field=field).ids)

    def check_fits(self, text: str, most: int, *, field: str) -> None:
        """Raise InvalidRequestError for a long text that clearly has more than ``most`` tokens, before all of
        it is encoded.

        Clearly: its pieces, encoded one by one, have more than twice as many, which cuts between them cannot
        explain.
        """
        if len(text) <= SMALL_BYTES and len(text.encode()) <= SMALL_BYTES:
            return
        found = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            found += len(encoded(self._inner, piece, add_special_tokens=False, field=field))
            if found > 2 * most:
                read = min(len(text), start + PIECE_CHARS)
                problem = (
                    f"found {len(text)} characters, the first {read} of which are about {found} tokens; "
                    f"the context holds {most}, prompt and answer together"
                )
                raise InvalidRequestError([FieldViolation(field, problem)])

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """What the post-processor puts before a text: BOS, or nothing."""
        plain = encoded(self._inner, "a", add_special_tokens=False, field="input").ids
        whole = encoded(self._inner, "a", add_special_tokens=True, field="input").ids
        places = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return tuple(whole[: next(places, 0)])

    def started(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return ids that begin with :attr:`start_ids` once, whether or not they did."""
        start = self.start_ids
        if not start:
            return ids
        found = 0  # counted before anything is cut: a text may hold nothing else, a million times
        while ids[found : found + len(start)] == start:
            found += len(start)
        return start + ids[found:]

    def decode(self, ids: Sequence[int], keep_special_tokens: bool) -> str:
        """Return the text of ids. Raises InvalidRequestError for ids outside the vocabulary."""
        outside = [id_ for id_ in ids if not 0 <= id_ < self.vocab_size]
        if outside:
            found = f"found {outside[0]}, expected ids of the vocabulary, 0 to {self.vocab_size - 1}"
            raise InvalidRequestError([FieldViolation("token_ids", found)])
        try:  # not ``with rust_call``, which would be one more call for every generated token
            if len(ids) < MANY_IDS:
                return self._inner.decode(ids, skip_special_tokens=not keep_special_tokens)
            return self._inner.decode_batch([ids], skip_special_tokens=not keep_special_tokens)[0]
        except BaseException as error:
            rust_call.check(error)
            raise

    def token_text(self, token_id: int) -> str | None:
        """Return a token as it is written: a special token's text, else what it decodes to; None if
        unknown.
        """
        if token_id in self._special:
            return self._special[token_id]
        if not 0 <= token_id < self.vocab_size or token_id in self.unused_ids:
            return None
        return self.decode([token_id], keep_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for; none for an id without a token."""
        with rust_call:
            return self._bytes.of(token_id)

    @cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._inner)

    @cached_property
    def guard(self) -> ControlTokenGuard:
        """Tells control tokens from text that only looks like them. Built when first needed."""
        from llorch_serve.text.control_tokens import ControlTokenGuard  # nothing but chats needs it

        with rust_call:
            return ControlTokenGuard(self._inner)


def check_text(text: str, field: str) -> None:
    """Raise InvalidRequestError, naming ``field``, if a text holds lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"found a lone surrogate at character {error.start}, expected text that is valid Unicode"
        raise InvalidRequestError([FieldViolation(field, found)]) from error


def _unused_ids(
    inner: tokenizers.Tokenizer, vocabulary: Mapping[str, int], vocab_size: int
) -> frozenset[int]:
    gaps = set(range(vocab_size)).difference(vocabulary.values())
    with rust_call:  # the vocabulary is by text, so of a text's two ids it has one
        return frozenset(id_ for id_ in gaps if inner.id_to_token(id_) is None)


def _byte_values(rules: Sequence[Mapping[str, object]], vocabulary: Mapping[str, int]) -> dict[int, int]:
    if all(rule.get("type") != "ByteFallback" for rule in rules):
        return {}
    return {id_: byte for token, id_ in vocabulary.items() if (byte := fallback_byte(token)) is not None}


class TextStream:
    """Turns the ids of one answer into text, id by id. Not for use from several threads.

    Joined, the pieces are ``tokenizer.decode(ids)``, cut at the first stop string. Held back are: bytes that
    may yet become a character; with byte-fallback decoders a whole run of byte tokens, as one bad byte spoils
    it all; and what may yet become a stop string.

    stop_strings: each ends the stream; none is empty. thought: where they are not looked for.
    kept: special tokens that are part of the text although others are not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: Iterable[str] = (),
        *,
        keep_special_tokens: bool = False,
        kept: frozenset[int] = frozenset(),
        thought: ThoughtMarks | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset() if keep_special_tokens else tokenizer.special_tokens.keys() - kept
        self._stops = StopMatcher(tuple(stop_strings), thought)
        # The last decoded tokens, and how many characters of their text are not news any more. The first
        # token is context: alone it would lose its leading space.
        self._window: list[int] = []
        self._told = 0
        # Watches the run of byte tokens that the window ends with, if there are stop strings.
        self._run: _ByteRun | None = None

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Take the next id; return new text, maybe empty, and the stop string if one is complete.

        After a match nothing more may be pushed.
        """
        tokenizer = self._tokenizer
        # A model's vocabulary may be padded beyond the tokenizer's.
        if token_id in self._hidden or token_id in tokenizer.unused_ids or token_id >= tokenizer.vocab_size:
            return "", None
        byte = tokenizer.byte_values.get(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        self._run = None
        self._window.append(token_id)
        text = tokenizer.decode(self._window, keep_special_tokens=True)  # the hidden ones are not among them
        # A last replacement character may be the beginning of a real one; those before it are final.
        unfinished = text.endswith(REPLACEMENT)
        final = len(text) - unfinished
        news = text[self._told : final]
        self._told = max(self._told, final)
        # An unfinished character has at most three bytes, hence tokens; one more is context. What a cut
        # leaves of an older character decodes to replacement characters of its own. Those have been told
        # already and do not change.
        keep = 4 if unfinished else 1
        if len(self._window) > keep:
            self._window = self._window[-keep:]
            self._told = len(tokenizer.decode(self._window, keep_special_tokens=True)) - unfinished
        return self._stops.push(news) if self._stops.stop_strings else (news, None)

    def finish(self) -> str:
        """Return all that is held back. Call it when the answer ended without a stop string."""
        news = self._decode(self._window)[self._told :]
        shown, matched = self._stops.push(news)
        return shown if matched else shown + self._stops.flush()

    def _push_byte(self, token_id: int, byte: int) -> tuple[str, str | None]:
        # The run's text is known when it ends. If it would complete a stop string now, the answer ends here,
        # and so does the run.
        if self._stops.stop_strings:
            if self._run is None:
                self._run = _ByteRun(self._decode, self._window, self._told, self._stops)
            found = self._run.push(token_id, byte)
            self._window.append(token_id)
            if found:
                news = self._decode(self._window)[self._told :]
                if self._stops.fork().push(news)[1] is not None:  # an unusual decoder may write it otherwise
                    return self._stops.push(news)
            return "", None
        self._window.append(token_id)
        return "", None

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, keep_special_tokens=True)


class _ByteRun:
    """Finds stop strings in a run of byte tokens while it grows, without decoding it anew for each token.

    A run of n bytes stands for its text if that is UTF-8, else for n replacement characters. Both are
    followed from the first byte on, since a valid run may be spoiled by any byte, and one that ends inside a
    character may yet be completed.

    decode: text of token ids. before: the ids before the run on which its text depends; told: how many
        characters of theirs are not news. stops: where the text before has left the search.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], before: Sequence[int], told: int, stops: StopMatcher
    ) -> None:
        self._decode = decode
        self._before = list(before)
        self._context = list(before)  # with the run's last complete character
        self._told = told
        self._character: list[int] = []  # ids of one that is not complete yet
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._valid = True
        self._as_text = stops.fork()
        self._as_replacements = stops.fork()
        self._spoiled = False  # whether replacement characters would complete a stop string
        self._found = False

    def push(self, token_id: int, byte: int) -> bool:
        """Take the next token; return, once, whether the text has a stop string if the run ends with it."""
        if self._found:
            return False
        self._spoiled = self._spoiled or self._as_replacements.push(REPLACEMENT)[1] is not None
        self._character.append(token_id)
        self._found = self._completes_stop() if self._completes_character(byte) else self._spoiled
        return self._found

    def _completes_character(self, byte: int) -> bool:
        """Take a byte; return whether all so far are whole characters."""
        if not self._valid:
            self._character.clear()
            return False
        try:
            return bool(self._utf8.decode(bytes([byte])))
        except UnicodeDecodeError:
            self._valid = False
            return False

    def _completes_stop(self) -> bool:
        # As the tokenizer's decoder writes the character behind another one: some drop or replace spaces.
        news = self._decode(self._context + self._character)[self._told :]
        self._context, self._character = self._before + self._character, []
        self._told = len(self._decode(self._context))
        return self._as_text.push(news)[1] is not None
