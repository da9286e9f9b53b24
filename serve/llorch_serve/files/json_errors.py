"""What decoding JSON raises where its bytes come from a stranger: caught together, since each has been
forgotten alone.
"""

from __future__ import annotations

from typing import Final

import msgspec

NOT_JSON: Final = (
    msgspec.MsgspecError,  # no JSON, or not of the type
    UnicodeError,  # a text that is not UTF-8, or a lone surrogate in text that was given as a string
    RecursionError,  # nested too deeply
)
