"""Typed reading of untrusted key-value data, where every key must be accounted for.

Input is a mapping out of a ``config.json`` or GGUF metadata; output are values of known type and range, or an
ArtifactError that names the key. What nobody asked for can be listed, and refused, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

from llorch_serve.errors import ArtifactError

MAX_NAME: Final = 200
"""Length up to which a name out of a file is repeated whole."""
_MAX_QUOTED: Final = 80
_MAX_ITEMS: Final = 64  # a longer list says more by its length
_Item = TypeVar("_Item", int, float, str)


class Fields:
    """Hands out the values of ``data`` and remembers which keys were asked for. ``origin`` names it in
    errors.

    A key whose value is null counts as absent.
    """

    def __init__(self, data: Mapping[str, object], *, origin: str) -> None:
        self._data = {key: value for key, value in data.items() if value is not None}
        self._stated = frozenset(data)
        self._origin = origin
        self._asked: set[str] = set()

    @property
    def origin(self) -> str:
        """What the data is called in errors."""
        return self._origin

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def states(self, key: str) -> bool:
        """Tell whether the key is there, if only with null."""
        return key in self._stated

    def get(self, key: str) -> object:
        """Return the value as it is, or None."""
        self._asked.add(key)
        return self._data.get(key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        """Return an integer within ``low..high``. Raises ArtifactError otherwise, or if absent without
        default.
        """
        value = self._present(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        above: float | None = None,
        at_least: float | None = None,
        high: float,
    ) -> float:
        """Return a finite number up to ``high``, above one bound or at least another. Raises as
        :meth:`integer` does.
        """
        value = self._present(key, default)
        low = above if above is not None else at_least
        assert low is not None
        limits = f"{'above' if above is not None else 'from'} {low:g} to {high:g}"
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not low <= value <= high
            or value == above
        ):
            raise self.wrong(key, f"a number {limits}")
        return float(value)

    def array(self, key: str, kind: type[_Item], *, length: int | None = None) -> Sequence[_Item]:
        """Return a list whose items are all of ``kind``. Raises ArtifactError otherwise, or if absent."""
        value = self._present(key, None)
        if not isinstance(value, (list, tuple)) or not all(type(item) is kind for item in value):
            raise self.wrong(key, f"a list of {kind.__name__}")
        if length is not None and len(value) != length:
            raise ArtifactError(f"{self._origin}: {key} has {len(value)} items, expected {length}")
        return value

    def numbers(self, key: str, *, length: int, above: float, high: float) -> tuple[float, ...]:
        """Return a list of ``length`` finite numbers, each above one bound and up to the other. Raises
        otherwise.
        """
        value = self._present(key, None)
        if not isinstance(value, (list, tuple)) or len(value) != length:
            raise self.wrong(key, f"a list of {length} numbers")
        if not all(type(item) in (int, float) and above < item <= high for item in value):
            raise self.wrong(key, f"numbers above {above:g} to {high:g}")
        return tuple(float(item) for item in value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean. Raises ArtifactError if it is something else."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def mapping(self, key: str) -> Mapping[str, object]:
        """Return a nested mapping, empty if absent. Raises ArtifactError if it is something else."""
        value = self._present(key, {})
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object or null")
        return value

    def require(self, key: str, accepted: object, consequence: str) -> None:
        """Refuse any value but ``accepted``, the one that is also meant where the key is absent."""
        value = self.get(key)
        if value is not None and (type(value) is bool) is (type(accepted) is bool) and value == accepted:
            return
        if value is not None:
            raise self.wrong(key, f"{accepted!r} ({consequence})")

    def unasked(self, *, known: Iterable[str] = ()) -> list[str]:
        """Return the keys with a value that were neither asked for nor are in ``known``."""
        return sorted(set(self._data) - self._asked - set(known))

    def wrong(self, key: str, expected: str) -> ArtifactError:
        """Return the error for a value that is not usable."""
        return ArtifactError(
            f"{self._origin}: {shown(key)} is {quoted(self._data.get(key))}, expected {expected}"
        )

    def _present(self, key: str, default: object) -> object:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise ArtifactError(
                f"{self._origin} lacks {key}, which a Llama model needs; the file is incomplete"
            )
        return default


def shown(name: str, limit: int = MAX_NAME) -> str:
    """Return a name out of a file in a form that a terminal prints as one short line."""
    plain = name if name.isprintable() else repr(name)
    return plain if len(plain) <= limit else f"{plain[: limit - 3]}..."


def quoted(value: object) -> str:
    """Return a value out of a file as one short line for an error, whatever it is and however large."""
    if isinstance(value, (list, tuple, dict)) and len(value) > _MAX_ITEMS:
        return f"{type(value).__name__} of {len(value)} items"
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 3]}..."


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names out of a file for an error: the first of them, each short, and how many more there are."""
    entries = list(names)
    first = ", ".join(shown(name, _MAX_QUOTED) for name in entries[:most])
    return first if len(entries) <= most else f"{first} and {len(entries) - most} more"


def refuse_unknown(keys: Sequence[str], origin: str) -> None:
    """Raise ArtifactError if there are ``keys`` that nobody understood; ``origin`` names where they stand."""
    if keys:
        raise ArtifactError(
            f"{origin} has settings that are not understood and might change the model: "
            f"{listed(keys)}; "
            "remove them if they have no influence on inference, or upgrade with: pip install -U llorch"
        )
