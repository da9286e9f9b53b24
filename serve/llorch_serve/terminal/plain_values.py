"""Values of flags that are what they look like, taken without Typer's converter.

Typer 0.29 has Pydantic convert every value, those that nobody gave too, and importing that takes tens of
milliseconds. The values here are the ones for which that changes nothing but the type; every other one, and
every error, stays Typer's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

_WHOLE: Final = re.compile(r"-?[0-9]{1,15}")
_DECIMAL: Final = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
_NOTHING: Final = object()


def with_plain_values(parameters: list[Any]) -> list[Any]:
    """Have parameters of a command take plain values as they are; return them. parameters: Typer's; those of
    a Typer without Pydantic stay as they are.
    """
    for parameter in parameters:
        described = getattr(parameter, "type_descriptor", None)
        if described is not None and "process_value" not in vars(parameter):
            parameter.process_value = _taking(parameter, described, parameter.process_value)
    return parameters


def _taking(parameter: Any, described: Any, process: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    several = parameter.multiple or parameter.nargs != 1
    info = described.parameter_info

    def take(context: Any, value: Any) -> Any:
        plain = _NOTHING
        if value is None and not parameter.required:
            plain = () if several else None
        elif not several and info.parser is None:
            plain = plain_value(described.annotation, value, low=info.min, high=info.max)
        if plain is _NOTHING:
            return process(context, value)
        return plain if parameter.callback is None else parameter.callback(context, parameter, plain)

    return take


def plain_value(annotation: object, value: object, *, low: float | None, high: float | None) -> object:
    """Return a value of a type, or a mark of no type where only Typer knows."""
    if annotation is str:
        return value if type(value) is str and _is_unicode(value) else _NOTHING
    found: float
    if annotation is int and type(value) is str and _WHOLE.fullmatch(value):
        found = int(value)
    elif annotation is float and type(value) is str and _DECIMAL.fullmatch(value):
        found = float(value)
    elif (annotation is int and type(value) is int) or (annotation is float and type(value) is float):
        found = value
    else:
        return _NOTHING
    within = (low is None or low <= found) and (high is None or found <= high)
    return found if within else _NOTHING


def _is_unicode(text: str) -> bool:
    """Tell whether a text is more than bytes that the system's encoding could not read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
