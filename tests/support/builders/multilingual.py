"""Texts in many scripts, drawn from a seed: for tests that tokenizers agree on whatever people write."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator
from typing import Final

# First and last code point of blocks, by what is written in them.
_SCRIPTS: Final = {
    "ascii": (0x20, 0x7E),
    "latin": (0xA0, 0x24F),
    "ipa and modifiers": (0x250, 0x2FF),
    "greek": (0x370, 0x3FF),
    "cyrillic": (0x400, 0x52F),
    "armenian": (0x530, 0x58F),
    "hebrew": (0x590, 0x5FF),
    "arabic": (0x600, 0x6FF),
    "syriac": (0x700, 0x74F),
    "devanagari": (0x900, 0x97F),
    "bengali": (0x980, 0x9FF),
    "gurmukhi": (0xA00, 0xA7F),
    "gujarati": (0xA80, 0xAFF),
    "tamil": (0xB80, 0xBFF),
    "telugu": (0xC00, 0xC7F),
    "kannada": (0xC80, 0xCFF),
    "malayalam": (0xD00, 0xD7F),
    "sinhala": (0xD80, 0xDFF),
    "thai": (0xE00, 0xE7F),
    "lao": (0xE80, 0xEFF),
    "tibetan": (0xF00, 0xFFF),
    "myanmar": (0x1000, 0x109F),
    "georgian": (0x10A0, 0x10FF),
    "hangul letters": (0x1100, 0x11FF),
    "ethiopic": (0x1200, 0x137F),
    "cherokee": (0x13A0, 0x13FF),
    "khmer": (0x1780, 0x17FF),
    "mongolian": (0x1800, 0x18AF),
    "vietnamese": (0x1E00, 0x1EFF),
    "old greek": (0x1F00, 0x1FFF),
    "punctuation": (0x2000, 0x206F),
    "signs": (0x2070, 0x23FF),
    "boxes and pictures": (0x2460, 0x27BF),
    "chinese punctuation": (0x3000, 0x303F),
    "kana": (0x3040, 0x30FF),
    "chinese": (0x4E00, 0x9FA5),
    "rare chinese": (0x3400, 0x4DBF),
    "hangul": (0xAC00, 0xD7A3),
    "forms": (0xFB00, 0xFB4F),
    "wide forms": (0xFF00, 0xFFEF),
    "gothic": (0x10330, 0x1034A),
    "mathematical letters": (0x1D400, 0x1D7FF),
    "emoji": (0x1F300, 0x1F6FF),
    "flags": (0x1F1E6, 0x1F1FF),
    "chinese beyond": (0x20000, 0x20100),
    "control": (0x00, 0x1F),
}
_FRAGMENTS: Final = (
    " ",
    "  ",
    "    ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n ",
    "\u00a0",
    "\u3000",
    "\u0085",
    "\u200d",
    "\ufe0f",
    "\u0301",
    "'s",
    "'LL",
    "'re ",
    "don't",
    "1",
    "23",
    "4567",
    "3.14",
    "2024-01-31",
    "the ",
    " Weather",
    "HTTPServer",
    "iPhone",
    "def f(x):",
    "https://a.b/c?d=1",
    "...",
    "!?",
    "\u3002",
    "\u2026",
)


def multilingual_texts(count: int, *, seed: int = 0) -> Iterator[str]:
    """Yield texts of up to some eighty characters: words of one to three scripts, between which stand spaces,
    line breaks, numbers, contractions and marks.

    Only characters that Python's tables know as assigned: on newer ones tokenizers may differ by the version
    of Unicode they were built with.
    """
    rng = random.Random(seed)
    letters = {name: _assigned(*block) for name, block in _SCRIPTS.items()}
    for _ in range(count):
        scripts = rng.choices(list(letters), k=rng.randint(1, 3))
        parts = []
        for _ in range(rng.randint(1, 12)):
            if rng.random() < 0.45:
                parts.append(rng.choice(_FRAGMENTS))
            else:
                parts += rng.choices(letters[rng.choice(scripts)], k=rng.randint(1, 9))
        yield "".join(parts)


def _assigned(first: int, last: int) -> list[str]:
    every = map(chr, range(first, last + 1))
    return [char for char in every if unicodedata.category(char) not in ("Cn", "Cs")]
