"""Gives the characters of a user's text stand-ins, so that what a template makes of the text shows who wrote
what.

The chat module renders a conversation once as it is and once with stand-ins for the user's characters.
Stand-ins are characters of two planes of Unicode that nobody has used (15 and 16, private ones, unless
somebody has): whatever special token the second rendering spells out, the template alone has written.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

# From a character of planes 0 and 1 to its stand-in, the first choice first; all but the first are
# unassigned.
_OFFSETS: Final = (0xF0000, 0xC0000, 0xA0000, 0x80000, 0x60000, 0x40000)
_SPAN: Final = 2 * 2**16  # of what has stand-ins, and of these
_PIECE: Final = 2**16  # characters that are changed at a time; other threads may run in between
# A stand-in as JSON in ASCII writes it, or Python's repr, which templates get where they print an object.
_ESCAPED: Final = re.compile(
    r"\\u(?P<high>d[89ab][0-9a-f]{2})\\u(?P<low>d[c-f][0-9a-f]{2})|\\U(?P<code>00(?:0[4-9a-f]|10)[0-9a-f]{4})"
)


class StandIns:
    """Stand-ins for the characters that could belong to one of ``special_texts``.

    Left as they are, unless a special token has them: white space, which templates trim, and what JSON
    escapes.

    normalised: what the tokenizer's normaliser makes of a character.
    """

    def __init__(self, special_texts: Iterable[str], normalised: Callable[[str], str]) -> None:
        texts = list(special_texts)
        self._offset = _OFFSETS[0]
        self._normalised = normalised
        self._special = set("".join(texts))
        self._kept = {c for c in map(chr, range(0x80)) if c.isspace() or c < " " or c in "'\"\\\x7f"}
        self._kept -= self._special
        # Names inside special tokens, which a template may complete: "user" in <|user|>.
        self._names = {name for text in texts for name in re.findall(r"\w+", text.casefold())}

    def avoiding(self, texts: Iterable[str]) -> StandIns | None:
        """Return stand-ins that are in none of ``texts``, as they are or escaped; None if none are left."""
        used = {plane for text in (*texts, *self._special) for plane in _planes(text)}
        for offset in _OFFSETS:
            if used.isdisjoint((offset >> 16, (offset >> 16) + 1)):
                found = copy.copy(self)
                found._offset = offset
                return found
        return None

    def replace_all(self, text: str) -> str:
        """Return a text in which every character has its stand-in."""
        return self._replaced(text, letters=True)

    def replace_special(self, text: str) -> str:
        """Return a text in which only those characters have stand-ins that special tokens have, or get from
        the normaliser.

        ASCII letters, digits and ``_`` stay, since templates compare with words and change their case. A text
        that is nothing but a name inside a special token is changed as a whole.
        """
        return self._replaced(text, letters=text.strip().casefold() in self._names)

    def replace_in_key(self, text: str) -> str:
        """Return a key, by which templates look things up, with its ASCII letters, digits and ``_``."""
        return self._replaced(text, letters=False)

    def restore(self, text: str) -> str:
        """Return a text with its own characters again."""
        if _may_escape(text):
            text = _ESCAPED.sub(self._unescaped, text)
        return "".join(self._restored(piece) for piece in _pieces(text))

    def _replaced(self, text: str, *, letters: bool) -> str:
        return "".join(self._replaced_piece(piece, letters) for piece in _pieces(text))

    def _replaced_piece(self, piece: str, letters: bool) -> str:
        return piece.translate(
            {ord(c): ord(c) + self._offset for c in set(piece) if self._has_stand_in(c, letters)}
        )

    def _has_stand_in(self, char: str, letters: bool) -> bool:
        if char in self._kept or ord(char) >= _SPAN:
            return False
        if letters:
            return char in self._special or not char.isspace()
        if char.isascii() and (char.isalnum() or char == "_"):
            return False
        return not self._special.isdisjoint((char, *self._normalised(char)))

    def _is_stand_in(self, code: int) -> bool:
        return self._offset <= code < self._offset + _SPAN

    def _restored(self, piece: str) -> str:
        return piece.translate(
            {ord(c): ord(c) - self._offset for c in set(piece) if self._is_stand_in(ord(c))}
        )

    def _unescaped(self, found: re.Match[str]) -> str:
        """Return what the same writer has for the character behind an escaped stand-in."""
        code = _code(found)
        if not self._is_stand_in(code):
            return found[0]
        char = chr(code - self._offset)
        return (json.dumps(char) if found["code"] is None else repr(char))[1:-1]


def _pieces(text: str) -> Iterator[str]:
    return (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))


def _may_escape(text: str) -> bool:
    return "\\ud" in text or "\\U00" in text


def _code(found: re.Match[str]) -> int:
    """Return the character that an escape stands for."""
    if found["code"] is not None:
        return int(found["code"], 16)
    return 0x10000 + ((int(found["high"], 16) - 0xD800) << 10) + int(found["low"], 16) - 0xDC00


def _planes(text: str) -> set[int]:
    """Return the planes of a text's characters, those included that it has escaped."""
    found = {ord(c) >> 16 for piece in _pieces(text) for c in set(piece)}
    if _may_escape(text):
        found |= {_code(escape) >> 16 for escape in _ESCAPED.finditer(text)}
    return found
