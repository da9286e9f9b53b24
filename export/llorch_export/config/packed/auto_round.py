"""Settings of auto-round's own format, which packs modules as GPTQ or AWQ does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal

from llorch_export.config.expressions import Expression
from llorch_export.config.fields import Fields, shown
from llorch_export.config.packed.awq import AwqPacking
from llorch_export.config.packed.base import MAX_PATTERNS, WAY_OUT, Packing, refuse_unasked
from llorch_export.config.packed.gptq import (
    AUTO_ROUND_INERT,
    INERT,
    GptqPacking,
    GptqScheme,
    Rules,
    gptq_scheme,
)
from llorch_export.config.packed.patterns import Expressions
from llorch_serve.errors import ArtifactError

# By packing_format: what stored zero points lack; None: packed as AWQ does.
_LAYOUTS: Final[Mapping[str, Literal[0, 1] | None]] = {
    "auto_round:auto_gptq": 1,
    "auto_round:gptq": 1,
    "auto_round": 0,
    "auto_round:gptqmodel": 0,
    "auto_round:auto_awq": None,
    "auto_round:awq": None,
}
_PLAIN_BITS: Final = 16
_PLAIN_NAME: Final = re.compile(r"[\w.-]+")
_INERT: Final = (
    *INERT,
    *AUTO_ROUND_INERT,
    "act_bits",
    "act_group_size",
    "act_sym",
    "act_data_type",
    "act_dynamic",
)


def auto_round_packing(fields: Fields) -> Packing:
    """Read the settings. Raises ArtifactError for what is not understood."""
    layout = fields.get("packing_format") or "auto_round:auto_gptq"
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise fields.wrong("packing_format", f"one of {', '.join(_LAYOUTS)}")
    _require_whole_numbers(fields)
    scheme = gptq_scheme(fields)
    rules = _rules(fields, scheme)
    offset = _LAYOUTS[layout]
    refuse_unasked(fields, _INERT)
    if offset is not None:
        return GptqPacking((), scheme, offset, carries=False, rules=rules)
    if scheme.bits != 4 or any(rule is not None and rule != scheme for _, rule in rules):
        raise ArtifactError(
            f"{fields.origin} packs {scheme.bits} bits, or modules differently, as {layout}; expected 4 bits "
            f"in all; {WAY_OUT}"
        )
    return AwqPacking((), scheme.group, by_output=False, symmetric=scheme.symmetric)


def _require_whole_numbers(fields: Fields) -> None:
    if fields.get("data_type") not in (None, "int", "int_sym", "int_asym"):
        raise fields.wrong("data_type", f"'int'; {WAY_OUT}")
    if fields.integer("act_bits", _PLAIN_BITS, low=1, high=32) < _PLAIN_BITS:
        raise fields.wrong("act_bits", f"{_PLAIN_BITS} or more: activations are not rounded here; {WAY_OUT}")
    if fields.get("rotation_config"):
        raise fields.wrong("rotation_config", f"nothing, since it changes what the model computes; {WAY_OUT}")


def _rules(fields: Fields, default: GptqScheme) -> Rules:
    """Read ``extra_config``: settings of modules by name, or by an expression over the start of it."""
    modules = fields.mapping("extra_config")
    if len(modules) > MAX_PATTERNS:
        raise fields.wrong("extra_config", f"at most {MAX_PATTERNS} modules")
    found: list[tuple[Expression | str, GptqScheme | None]] = []
    expressions = Expressions(f"{fields.origin}: extra_config")
    for name, settings in modules.items():
        origin = f"{fields.origin}: extra_config: {shown(name)}"
        if not isinstance(settings, Mapping):
            raise ArtifactError(f"{origin} is no object of settings; {WAY_OUT}")
        own = Fields(settings, origin=origin)
        plain = own.integer("bits", default.bits, low=1, high=32) >= _PLAIN_BITS
        rule = name if _PLAIN_NAME.fullmatch(name) else expressions.start(name)
        if plain:
            found.append((rule, None))
            continue
        _require_whole_numbers(own)
        found.append((rule, gptq_scheme(own, default)))
        refuse_unasked(own, _INERT)
    return tuple(found)
