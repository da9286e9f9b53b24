"""The boundary to tokenizers, the Rust library: what it is given has been checked, and its panics are errors
of ours.

Content of a tokenizer.json comes in; a ``tokenizers.Tokenizer`` goes out. Whoever calls that one does so
inside :data:`rust_call`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import tokenizers

from llorch_serve.errors import ArtifactError, FieldViolation, InvalidRequestError, LibraryPanicError
from llorch_serve.text.panics import panics_as_errors

MAX_TOKENS: Final = 2**21
"""Most tokens, and one more than the highest id: masks and rows are as long as that. Vocabularies have up to
2**18.
"""

MAX_TOKEN_CHARS: Final = 2048
"""Longest token; what is done for one generated token costs as much. Published vocabularies have up to
512.
"""

MAX_PIECE_CHARS: Final = 256
"""Longest piece of SentencePiece, where work goes by the square. Its trainer makes 16 unless it is told
otherwise.
"""

MAX_VOCABULARY_CHARS: Final = 2**24
"""Most characters of all tokens together. Published vocabularies have up to 2**21."""

MAX_MERGES: Final = 2**22
MAX_PATTERN_CHARS: Final = 4096
"""Of a regular expression. What it may cost at a place of a text, the library bounds: ten million steps, then
it panics.
"""

MAX_STEPS: Final = 64
"""Most steps of normaliser, splitting, post-processor or decoder; also most tokens that are put around a
text.
"""

MAX_GROWTH: Final = 16
"""How many times longer replacements may make a text. A space becomes another character; that is all models
need.
"""

_PARTS: Final = ("normalizers", "pretokenizers", "processors", "decoders")


rust_call: Final = panics_as_errors("tokenizers")
"""``with rust_call:`` around calls of the library. Has no state; from any thread, also nested."""


def encoded(
    inner: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, field: str
) -> tokenizers.Encoding:
    """Encode one text, as a batch: alone it would be encoded with the interpreter's lock held.

    field: names the text in an error. Raises InvalidRequestError for text that the tokenizer has no tokens
        for, and
    LibraryPanicError.
    """
    try:
        with rust_call:
            [found] = inner.encode_batch([text], add_special_tokens=add_special_tokens)
            return found
    except LibraryPanicError:
        raise
    except Exception as error:  # the library raises nothing more precise
        problem = (
            f"found text that this model's tokenizer cannot encode: {str(error)[:200]}; expected other text"
        )
        raise InvalidRequestError([FieldViolation(field, problem)]) from error


def read_tokenizer(data: bytes, *, origin: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json; ``origin`` names it in errors.

    Raises ArtifactError if the library cannot read or use it, or if it is larger than any tokenizer has to
    be.
    """
    try:
        description = msgspec.json.decode(data)
        check_tokenizer(description, origin=origin)
        # Written anew: of a key that stands twice the library would see both values, and one was checked.
        text = msgspec.json.encode(_with_short_merges(description)).decode()
        with rust_call:
            inner = tokenizers.Tokenizer.from_str(text)
            inner.no_padding()
            inner.no_truncation()
    except ArtifactError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise _unusable(origin, error) from error
    _try(inner, origin)
    return inner


def _with_short_merges(description: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json whose merges are written as ``"a b"`` where they were ``["a", "b"]``, if all of
    them can be: the library takes either, and reads the former in two thirds of the time.
    """
    model = description["model"]
    merges = model.get("merges")
    if not isinstance(merges, list) or set(map(type, merges)) != {list} or set(map(len, merges)) != {2}:
        return description
    try:
        written = list(map(" ".join, merges))
    except TypeError:  # halves that are no text, of which the library tells
        return description
    joined = "".join(written)
    # A space inside a half is no border, and the library skips what looks like the first line of a file.
    if joined.count(" ") != len(written) or "#version" in joined:
        return description
    return {**description, "model": {**model, "merges": written}}


def _try(inner: tokenizers.Tokenizer, origin: str) -> None:
    """Raise ArtifactError if the tokenizer panics whatever the text; most damaged files do."""
    try:
        with rust_call:
            for special in (False, True):
                inner.encode("a", add_special_tokens=special)
            inner.decode([0], skip_special_tokens=False)
    except LibraryPanicError as error:
        raise _unusable(origin, error) from error
    except Exception:  # noqa: BLE001, S110 - a vocabulary without "a", and without a token for what it lacks
        pass


def _unusable(origin: str, error: Exception) -> ArtifactError:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return ArtifactError(f"{origin} is not a usable tokenizer.json: {reason}. Export the model again.")


def check_tokenizer(description: object, *, origin: str) -> None:
    """Raise ArtifactError if a tokenizer.json, decoded, asks for more memory or time than any tokenizer has
    to.
    """
    if not isinstance(description, dict) or not isinstance(description.get("model"), dict):
        raise _refused(origin, "is not a usable tokenizer.json", "an object with a model")
    model = description["model"]
    if model.get("continuing_subword_prefix") and isinstance(model.get("merges"), list):
        # The library cuts that many bytes off each right half, even inside a character, and then ends the
        # process.
        raise _refused(origin, "has a continuing_subword_prefix beside merges", "none")
    merges = model.get("merges")
    if isinstance(merges, list) and len(merges) > MAX_MERGES:
        raise _refused(origin, f"has {len(merges)} merges", f"at most {MAX_MERGES}")
    _check_tokens(model.get("vocab"), description.get("added_tokens"), origin)
    for part in ("normalizer", "decoder", "pre_tokenizer", "post_processor"):
        steps = list(_steps(description.get(part)))
        if len(steps) > MAX_STEPS:
            raise _refused(origin, f"has a {part} of more than {MAX_STEPS} steps", "fewer")
        for step in steps:
            _check_step(step, part, origin)
        growth = math.prod(map(_growth, steps))
        if growth > MAX_GROWTH:
            raise _refused(
                origin, f"has a {part} that may make a text {growth} times as long", str(MAX_GROWTH)
            )


def _check_tokens(vocabulary: object, added: object, origin: str) -> None:
    longest = MAX_TOKEN_CHARS
    if isinstance(vocabulary, dict):
        texts: list[Any] = list(vocabulary)
        ids: list[Any] = list(vocabulary.values())
        if len({id_ for id_ in ids if type(id_) is int}) < len(ids):
            # The library reads it, but writes one of the two; no second tokenizer can be made from that.
            raise _refused(origin, "gives two tokens one id, or one that is no integer", "an id for each")
    elif isinstance(vocabulary, list) and all(isinstance(entry, list) and entry for entry in vocabulary):
        texts, ids, longest = [entry[0] for entry in vocabulary], [], MAX_PIECE_CHARS
    else:
        raise _refused(
            origin,
            "is not a usable tokenizer.json: its model has no vocabulary",
            "an object of tokens and ids, or a list of pieces",
        )
    check_token_sizes(texts, longest=longest, origin=origin)
    extra = added if isinstance(added, list) else []
    if not all(isinstance(token, dict) for token in extra):
        raise _refused(origin, "has added_tokens that are no objects", "objects with id and content")
    check_token_sizes([token.get("content") for token in extra], longest=MAX_TOKEN_CHARS, origin=origin)
    ids += [token.get("id") for token in extra]
    bad = next((id_ for id_ in ids if type(id_) is not int or not 0 <= id_ < MAX_TOKENS), None)
    if bad is not None:
        raise _refused(origin, f"has a token with id {str(bad)[:40]}", f"integers from 0 to {MAX_TOKENS - 1}")


def check_token_sizes(tokens: Sequence[object], *, longest: int, origin: str) -> None:
    """Raise ArtifactError if tokens are no text, too many, or too long: one of them, or all together."""
    if len(tokens) > MAX_TOKENS:
        raise _refused(origin, f"has {len(tokens)} tokens", f"at most {MAX_TOKENS}")
    total = 0
    for index, token in enumerate(tokens):
        if not isinstance(token, str):
            raise _refused(origin, f"has {type(token).__name__} in place of token {index}", "text")
        if len(token) > longest:
            raise _refused(
                origin, f"has a token of {len(token)} characters ({token[:20]!r}...)", f"at most {longest}"
            )
        total += len(token)
    if total > MAX_VOCABULARY_CHARS:
        raise _refused(
            origin, f"has tokens of {total} characters together", f"at most {MAX_VOCABULARY_CHARS}"
        )


def _steps(part: object) -> Iterator[Mapping[str, Any]]:
    """Yield a part's steps, those inside sequences too; one more than MAX_STEPS at most."""
    waiting, count = [part], 0
    while waiting and count <= MAX_STEPS:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        count += 1
        yield step
        for name in _PARTS:
            inner = step.get(name)
            waiting += inner if isinstance(inner, list) else []


def _check_step(step: Mapping[str, Any], part: str, origin: str) -> None:
    pattern = step.get("pattern")
    expression = pattern.get("Regex") if isinstance(pattern, dict) else None
    if expression is not None and part == "decoder":
        # A decoder runs between the engine's steps, and every other request would wait for its search.
        raise _refused(origin, "has a decoder with a regular expression", "plain texts to replace")
    if isinstance(expression, str) and len(expression) > MAX_PATTERN_CHARS:
        raise _refused(
            origin,
            f"has a regular expression of {len(expression)} characters",
            f"at most {MAX_PATTERN_CHARS}",
        )
    for single in ("single", "pair"):
        around = step.get(single)
        if isinstance(around, list) and len(around) > MAX_STEPS:
            raise _refused(origin, f"puts {len(around)} tokens around a text", f"at most {MAX_STEPS}")
    special = step.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else ():
        ids = token.get("ids") if isinstance(token, dict) else None
        if isinstance(ids, list) and len(ids) > MAX_STEPS:
            raise _refused(origin, f"puts {len(ids)} tokens around a text", f"at most {MAX_STEPS}")


def _growth(step: Mapping[str, Any]) -> int:
    """Return how many times longer a step may make a text; of what is put in front, for each character there
    is.
    """
    content, pattern = step.get("content"), step.get("pattern")
    if step.get("type") == "Prepend" and isinstance(step.get("prepend"), str):
        return 1 + len(step["prepend"])
    if not isinstance(content, str) or pattern is None:
        return 1
    plain = pattern.get("String") if isinstance(pattern, dict) else None
    if not isinstance(plain, str) or not plain:  # may match nothing, between any two characters
        return 1 + len(content)
    return max(1, math.ceil(len(content) / len(plain)))


def _refused(origin: str, found: str, expected: str) -> ArtifactError:
    return ArtifactError(
        f"{origin} {found}; expected {expected}. Export the model again from a sound source."
    )
