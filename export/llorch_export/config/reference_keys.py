"""Which settings of a config.json transformers reads to compute a model's logits.

The table beside this module, ``reference_keys.json``, is found in transformers' source by
``ci/generate-config-keys``. A setting that is not in it changes nothing in the reference.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

import msgspec

_TABLE: Final = "reference_keys.json"


class ReferenceKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What transformers reads.

    transformers: the version whose source it was found in.
    keys: what each family's computation reads, by model type.
    rope: what each rotary type reads of ``rope_scaling`` or ``rope_parameters``; ``default`` is in
        default_rope, by family.
    causal_lms: the class of every language model that transformers has, by model type.
    """

    transformers: str
    keys: dict[str, frozenset[str]]
    rope: dict[str, frozenset[str]]
    default_rope: dict[str, frozenset[str]]
    causal_lms: dict[str, str]


@functools.cache
def reference_keys() -> ReferenceKeys:
    """Return the table."""
    return msgspec.json.decode(Path(__file__).with_name(_TABLE).read_bytes(), type=ReferenceKeys)
