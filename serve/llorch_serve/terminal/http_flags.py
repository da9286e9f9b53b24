"""Flags of ``llorch serve`` about whom its HTTP front answers, and what it makes of fields that it does not
know.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Final

import typer

from llorch_serve.errors import UsageError
from llorch_serve.http.batches.settings import BatchSettings
from llorch_serve.http.settings import HttpSettings
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.terminal.groups import FlagGroup

_HOST: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?|\*")
_ORIGIN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?P<port>:\d+)?"
)
_USUAL_PORTS: Final = {"http": ":80", "https": ":443"}  # which browsers leave out


class HttpFlags(FlagGroup, frozen=True):
    """Whom HTTP answers, and what becomes of fields that it does not know."""

    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="With --http: a further name under which clients reach this worker, as host.docker.internal "
            "(the header Host); may be repeated. On the loopback only its own names are answered, elsewhere "
            "all unless some are given here. '*': all.",
            show_default=False,
        ),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-origin",
            metavar="ORIGIN",
            help="With --http: web pages that may call this worker from a browser (CORS), as "
            "http://localhost:3000; may be repeated. '*': all pages. Default: none.",
            show_default=False,
        ),
    ] = None
    unknown_fields: Annotated[
        UnknownFields,
        typer.Option(
            "--unknown-fields",
            help="With --http: whether fields that llorch does not know are refused, or left aside and told "
            "in the answer's llorch.ignored and once in the log. Tokens, scores and jobs refuse them always.",
        ),
    ] = UnknownFields.REFUSE

    def read(self, http: str | None, batches: BatchSettings | None = None) -> HttpSettings:
        """Return the settings. http: where the front listens, None: nowhere. batches: of files and batches.

        Raises UsageError for a name that no client could send, and for flags without a front.
        """
        if http is None:
            for flag in self.given():
                raise UsageError(f"{flag} has no effect without --http; leave it out, or add --http 8080")
        return HttpSettings(
            tuple(map(_read_host, self.allowed_host or ())),
            tuple(map(_read_origin, self.allowed_origin or ())),
            self.unknown_fields,
            batches,
        )


def _read_host(text: str) -> str:
    """Return a host as the header has it, in lower case."""
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        if _HOST.fullmatch(text):
            return text.lower()
        raise UsageError(
            f"--allowed-host is {text!r}; expected a name like host.docker.internal, without scheme and port"
        ) from None
    return f"[{address}]" if address.version == 6 else str(address)


def _read_origin(text: str) -> str:
    """Return an origin as browsers write it."""
    origin = text.lower()
    if origin in ("*", "null"):
        return origin
    found = _ORIGIN.fullmatch(origin)
    if found is None:
        raise UsageError(
            f"--allowed-origin is {text!r}; expected scheme, host and port as in http://localhost:3000, "
            "without a path, or '*'"
        )
    usual = found["port"] == _USUAL_PORTS.get(found["scheme"])
    return f"{found['scheme']}://{found['host']}{'' if usual else found['port'] or ''}"
