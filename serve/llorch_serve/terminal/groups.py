"""Commands that are composed from groups of flags.

A group is a class whose fields are flags, annotated as Typer's parameters are. A command's function takes
groups and plain flags; :func:`composed` shows Typer one parameter for each flag, in the order in which
they stand, and gives the function one object for each group.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec


class FlagGroup(msgspec.Struct, frozen=True):
    """Flags that belong together. Every field has a default, which stands where a command lacks the flag.

    A struct rather than a dataclass: commands have thirty groups in all, and ``llorch --help`` makes each.
    """

    def given(self) -> list[str]:
        """Return the flags that were set to something else than their default or false, as they are typed."""
        defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return given(**{name: value for name, value in values.items() if value != defaults[name]})


def given(**flags: object) -> list[str]:
    """Return those flags, as they are typed, that are set and not false."""
    names = [name for name, value in flags.items() if value is not None and value is not False]
    return [f"--{name.replace('_', '-')}" for name in names]


@dataclass(frozen=True, slots=True)
class Only:
    """The flags of a group that a command has: ``session: Annotated[SessionFlags, only("max_context")]``."""

    names: tuple[str, ...]


def only(*names: str) -> Only:
    """Leave the other flags of a group at their defaults, and out of the command."""
    return Only(names)


def composed(command: Callable[..., None]) -> Callable[..., None]:
    """Return a function for Typer: the flags of ``command`` and of its groups, each a parameter of its own.

    Raises ValueError for two flags of one name, TypeError for a name that a group lacks.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[FlagGroup]] = {}
    flags: dict[str, tuple[str, ...]] = {}
    parameters: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if (group := _group(hints[name])) is None:
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
        else:
            found = _parameters(group, hints[name])
            groups[name], flags[name] = group, tuple(found)
            parameters += found.values()

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        made = {
            name: group(**{flag: values.pop(flag) for flag in flags[name]}) for name, group in groups.items()
        }
        command(**made, **values)

    flat.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # as the standard library reads it
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _group(hint: Any) -> type[FlagGroup] | None:
    """Return the group that a parameter of a command is annotated with, if it is one."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return kind if isinstance(kind, type) and issubclass(kind, FlagGroup) else None


def _parameters(group: type[FlagGroup], hint: Any) -> Mapping[str, Parameter]:
    """Return what a group adds to a command's parameters, by name and in order."""
    hints = get_type_hints(group, include_extras=True)
    defaults = dict(zip(group.__struct_fields__, group.__struct_defaults__, strict=True))
    chosen = [note for note in get_args(hint) if isinstance(note, Only)]
    wanted = chosen[0].names if chosen else group.__struct_fields__
    if unknown := set(wanted) - set(defaults):
        raise TypeError(f"{group.__name__} has no {', '.join(sorted(unknown))}")
    return {
        name: Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
        if name in wanted
    }
