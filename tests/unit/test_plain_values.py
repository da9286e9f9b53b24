"""Values that are taken without Typer's converter are what Typer makes of them, and its errors stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from llorch_serve import cli
from llorch_serve.terminal.plain_values import with_plain_values

VALUES = (
    *(None, "", "a", "ä", "\udc80", "auto", "int8", ".", "/nowhere", ()),
    *("0", "1", "-1", "01", "+1", " 1", "1_0", "\u0663", "100000", "9" * 15, "9" * 16, "9" * 400),
    *("0.5", "-0", "-0.0", "1.", ".5", "1e3", "nan", "inf", "0.1000000000000000055", "1.0"),
    *(0, 7, -7, 0.25, True, False, 10**6),
)


def outcome(take: Any, context: Any, value: object) -> tuple[object, ...]:
    """Return what becomes of a value: its type and itself, or the error's type and what it says."""
    try:
        found = take(context, value)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return type(error), str(error)
    return type(found), repr(found)


def parameters() -> Iterator[tuple[str, Any, Any]]:
    group: Any = get_command(cli.app)
    for name in cli.COMMANDS:
        command = group.get_command(None, name)
        context = command.make_context(name, [], resilient_parsing=True)
        for parameter in command.get_params(context):
            yield f"{name} {parameter.name}", parameter, context


def test_every_flag_takes_every_value_as_typer_does() -> None:
    for name, parameter, context in parameters():
        own = type(parameter).process_value.__get__(parameter)
        # An older Typer's parameters convert by themselves, and are left alone.
        assert ("process_value" in vars(parameter)) == hasattr(parameter, "type_descriptor")
        for value in VALUES:
            taken = outcome(parameter.process_value, context, value)
            assert taken == outcome(own, context, value), (name, value)


def test_nothing_is_converted_for_plain_values(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = get_command(cli.app)
    command = group.get_command(None, "generate")
    for parameter in command.params:
        if hasattr(parameter, "get_runtime_param"):
            monkeypatch.setattr(parameter, "get_runtime_param", lambda: pytest.fail("converted by Typer"))
    flags = ["model", "--prompt", "ä", "--max-tokens", "3", "--temperature", "0.5", "--seed", "7"]
    found = command.make_context("generate", flags).params
    expected = {"model_dir": "model", "prompt": "ä", "max_tokens": 3, "temperature": 0.5, "seed": 7}
    assert expected.items() <= found.items()


def test_a_typer_that_converts_by_itself_is_left_alone() -> None:
    class Parameter:
        """One of an older Typer."""

        def process_value(self, context: object, value: object) -> object:
            return value

    parameter = Parameter()
    assert with_plain_values([parameter]) == [parameter]
    assert vars(parameter) == {}
