"""What whoever runs a worker decides of its HTTP front, beside where it listens.

Made of flags by ``terminal/http_flags.py``, which has checked and normalised them; nothing here needs the
libraries of the front.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.unknown_fields import UnknownFields


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """hosts: further names under which the worker is addressed; ``*`` among them: any name.

    origins: of web pages that may call the worker from a browser, as browsers write them; ``*``: any page.
    unknown: what becomes of fields that a route does not know, where it has an answer to tell them in.
    batches: where files and batches are kept, and within which bounds; None: there are none.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    unknown: UnknownFields = UnknownFields.REFUSE
    batches: BatchSettings | None = None


DEFAULT_SETTINGS: Final = HttpSettings()
