"""How much a grammar may cost. The examiner's process and the worker compile with the same limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLParserLimits

EXAMINATION_S: Final = 3.0
"""Longest that a grammar may take to compile, in seconds of the processor's time."""

EXAMINATION_BYTES: Final = 256 * 2**20
"""Most memory that compiling one may take."""

STEP_S: Final = 0.01
"""Processor time that the grammar of an answer may take for every token, in seconds; the usual is a few
ten-thousandths.
"""

MOST_OVER_S: Final = 0.3
"""What all tokens of an answer may take beyond that, in seconds; then the answer ends. Others wait for all of
it.
"""

MAX_WAITING: Final = 64
"""Grammars that may wait to be compiled."""

MAX_REQUESTS: Final = 1024
"""Requests that may wait for those grammars, before the worker's queue has them."""

MAX_OF_CLIENT: Final = 16
"""Of one client."""

MAX_KEPT: Final = 64
"""Compiled grammars that are kept."""

MAX_PROGRAM_BYTES: Final = 512 * 2**20
"""Memory that compiled grammars may take, those that are kept and those of requests that run or wait."""


def parser_limits() -> LLParserLimits:
    """Return what bounds a grammar's size, the work of one mask (some 40 ms, if every token reaches it) and
    the states that are kept.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        # Otherwise every long lexeme is run over the whole vocabulary before the first token.
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
