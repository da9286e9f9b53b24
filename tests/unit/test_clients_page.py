"""What docs/clients.md says of a client follows from what its script showed."""

from __future__ import annotations

from clients.page import COLUMNS, written
from clients.table import Client, Shown

CLIENT = Client("a client", ("a==1",), "a.py")


def marks(shown: Shown) -> list[str]:
    (line,) = [line for line in written([shown]).splitlines() if line.startswith("| a client |")]
    return [mark.strip() for mark in line.strip("|").split("|")[2:]]


def test_a_row_that_a_client_lacks_is_a_hyphen() -> None:
    rows = [{"row": "plain", "holds": True}, {"row": "tools", "holds": False}]
    found = dict(zip(COLUMNS, marks(Shown(CLIENT, rows)), strict=True))
    assert (found["plain"], found["tools"], found["usage"]) == ("yes", "**no**", "-")


def test_a_client_that_broke_off_lacks_nothing_but_failed() -> None:
    shown = Shown(CLIENT, [{"row": "plain", "holds": True}], failure="ended with 1")
    assert marks(shown) == ["yes", *["**no**"] * (len(COLUMNS) - 1)]
