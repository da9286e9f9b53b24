"""Gives the characters of a user's text stand-ins, so that what a template makes of the text shows who wrote what.

The chat module renders a conversation once as it is and once disguised. Stand-ins are private characters of Unicode (its
planes 15 and 16), of which no special token is made: whatever special token the disguised rendering spells out, the
template alone has written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Final

_OFFSET: Final = 0xF0000  # from a character of planes 0 and 1 to its stand-in
_PIECE: Final = 2**16  # characters that are changed at a time; other threads may run in between
# A stand-in as JSON in ASCII writes it, or Python's repr, which templates get where they print an object.
_ESCAPED: Final = re.compile(
    r"\\u(?P<high>db[89a-f][0-9a-f])\\u(?P<low>d[c-f][0-9a-f]{2})|\\U(?P<code>000f[0-9a-f]{4}|0010[0-9a-f]{4})"
)


class Disguise:
    """Stand-ins for the characters that could belong to one of ``special_texts``.

    Left as they are, unless a special token has them: white space, which templates trim, and what JSON escapes.

    normalised: what the tokenizer's normaliser makes of a character.
    """

    def __init__(self, special_texts: Iterable[str], normalised: Callable[[str], str]) -> None:
        texts = list(special_texts)
        self._normalised = normalised
        self._special = set("".join(texts))
        self._kept = {c for c in map(chr, range(0x80)) if c.isspace() or c < " " or c in "'\"\\\x7f"}
        self._kept -= self._special
        # Names inside special tokens, which a template may complete: "user" in <|user|>.
        self._names = {name for text in texts for name in re.findall(r"\w+", text.casefold())}

    def whole(self, text: str) -> str:
        """Return a text in which every character has its stand-in."""
        return self._changed(text, letters=True)

    def marks(self, text: str) -> str:
        """Return a text in which only those characters have stand-ins that special tokens have, or get from the normaliser.

        ASCII letters, digits and ``_`` stay, since templates compare with words and change their case. A text that is nothing but a name inside a special token is changed as a whole.
        """
        return self._changed(text, letters=text.strip().casefold() in self._names)

    def key(self, text: str) -> str:
        """Return a key, by which templates look things up, with its ASCII letters, digits and ``_``."""
        return self._changed(text, letters=False)

    def reveal(self, text: str) -> str:
        """Return a text with its own characters again."""
        if "\\udb" in text or "\\U00" in text:
            text = _ESCAPED.sub(_unescaped, text)
        return "".join(_revealed(text[at : at + _PIECE]) for at in range(0, len(text), _PIECE))

    def _changed(self, text: str, *, letters: bool) -> str:
        pieces = (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
        return "".join(self._changed_piece(piece, letters) for piece in pieces)

    def _changed_piece(self, piece: str, letters: bool) -> str:
        return piece.translate(
            {ord(c): ord(c) + _OFFSET for c in set(piece) if self._has_stand_in(c, letters)}
        )

    def _has_stand_in(self, char: str, letters: bool) -> bool:
        if char in self._kept or ord(char) >= 2 * 2**16:
            return False
        if letters:
            return char in self._special or not char.isspace()
        if char.isascii() and (char.isalnum() or char == "_"):
            return False
        return not self._special.isdisjoint((char, *self._normalised(char)))


def _revealed(piece: str) -> str:
    return piece.translate({ord(c): ord(c) - _OFFSET for c in set(piece) if ord(c) >= _OFFSET})


def _unescaped(found: re.Match[str]) -> str:
    """Return what the same writer has for the character behind an escaped stand-in."""
    if found["code"] is not None:
        return repr(chr(int(found["code"], 16) - _OFFSET))[1:-1]
    high, low = int(found["high"], 16), int(found["low"], 16)
    return json.dumps(chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00) - _OFFSET))[1:-1]
