"""What a row of the table of conflicts is, and the rows of which there are several alike.

``conflicts.py`` has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llorch_export.formats.precisions import target_precisions
from llorch_export.recipes.settled import SettledOptions, Storage
from llorch_export.recipes.storage_defaults import BLOCK_SIZES


@dataclass(frozen=True, slots=True)
class Conflict:
    """An option that others leave without effect, or rule out.

    option: the name of its field in :class:`ExportOptions`.
    others: the fields that rule it out, or of which it needs one; none: its own value is out of range.
    found: tells whether it is so. Rows above this one have found nothing.
    message: what is wrong and what to do.
    """

    option: str
    others: tuple[str, ...]
    found: Callable[[SettledOptions], bool]
    message: Callable[[SettledOptions], str]


def no_effect(
    option: str, others: tuple[str, ...], storage: Storage, why: Callable[[SettledOptions], str]
) -> Conflict:
    """Return the row of an option that means nothing in a kind of storage."""
    return Conflict(
        option,
        others,
        lambda s: s.storage is storage and getattr(s.options, option) is not None,
        lambda s: f"{_flag(option)} {getattr(s.options, option)} has no effect {why(s)}",
    )


def beyond_target(
    option: str, others: tuple[str, ...], value: Callable[[SettledOptions], str], *, table: bool
) -> Conflict:
    """Return the row of a precision that the target has not. table: of head and embedding."""

    def choices(s: SettledOptions) -> list[str]:
        return [*target_precisions(s.target, s.target.table_bits if table else s.target.linear_bits)]

    return Conflict(
        option,
        others,
        lambda s: value(s) not in choices(s),
        lambda s: f"{_flag(option)} is {value(s)}; --target {s.options.target} takes {', '.join(choices(s))}",
    )


def wrong_block_size(option: str, size: Callable[[SettledOptions], int]) -> Conflict:
    """Return the row of a size that the runtime's kernels do not take."""
    return Conflict(
        option,
        (),
        lambda s: s.storage is Storage.BLOCKS and size(s) not in BLOCK_SIZES,
        lambda s: (
            f"{_flag(option)} is {size(s)}; the runtime's kernels are right for "
            f"{', '.join(map(str, BLOCK_SIZES))}"
        ),
    )


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
