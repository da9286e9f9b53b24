"""Commands are composed from groups of flags, and the command line does not show it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from llorch_serve.terminal.groups import FlagGroup, composed, given, only


class Colours(FlagGroup, frozen=True):
    """Some flags."""

    red: Annotated[int, typer.Option(help="How red.")] = 1
    green_ish: Annotated[bool, typer.Option("--green-ish", help="Green too.")] = False
    blue: Annotated[list[str] | None, typer.Option(help="Kinds of blue.", show_default=False)] = None


class Shapes(FlagGroup, frozen=True):
    """Others."""

    corners: Annotated[int | None, typer.Option(min=3)] = None


def run(command: Callable[..., None], *arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output


def test_a_command_gets_one_object_for_each_group():
    found = []

    @composed
    def command(first: str, colours: Colours, size: int = 2, *, shapes: Shapes) -> None:
        found.append((first, colours, size, shapes))

    run(command, "a", "--red", "3", "--green-ish", "--blue", "sky", "--blue", "sea", "--corners", "5")
    run(command, "b", "--size", "9")
    assert found == [
        ("a", Colours(red=3, green_ish=True, blue=["sky", "sea"]), 2, Shapes(corners=5)),
        ("b", Colours(), 9, Shapes()),
    ]


def test_flags_stand_in_the_order_of_the_command():
    @composed
    def command(first: str, colours: Colours, size: int = 2, *, shapes: Shapes) -> None:
        """Say something."""

    assert list(inspect.signature(command).parameters) == [
        *("first", "red", "green_ish", "blue", "size", "corners")
    ]
    assert command.__doc__ == "Say something."
    shown = run(command, "--help")
    assert "Say something." in shown
    assert "How red." in shown


def test_a_command_may_have_some_flags_of_a_group_alone():
    found = []

    @composed
    def command(colours: Annotated[Colours, only("blue", "red")]) -> None:
        found.append(colours)

    assert list(inspect.signature(command).parameters) == ["red", "blue"]
    run(command, "--red", "3")
    assert found == [Colours(red=3)]


def test_a_flag_that_a_group_lacks_is_a_mistake():
    def command(colours: Annotated[Colours, only("read")]) -> None: ...

    with pytest.raises(TypeError, match="Colours has no read"):
        composed(command)


def test_two_flags_of_one_name_are_a_mistake():
    def command(red: int, colours: Colours) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name: 'red'"):
        composed(command)


def test_flags_that_were_given_are_named_as_they_are_typed():
    assert Colours().given() == []
    assert Colours(red=1, green_ish=True, blue=["sea"]).given() == ["--green-ish", "--blue"]
    assert Colours(red=0).given() == ["--red"]
    assert given(one_flag=0, other=None, third=False, fourth="x") == ["--one-flag", "--fourth"]
