"""What goes wrong between ModelScope and its client, said in one sentence with what to do.

Input are the exceptions of ``modelscope-hub`` and of ``requests`` under it, whose texts are partly Chinese
and are not repeated; output is an error of ours, of the kinds that :mod:`llorch_serve.hub.failures` has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

from llorch_serve.errors import ArtifactError, HubError, LlorchError
from llorch_serve.hub.credentials import hide_credentials, require_sendable
from llorch_serve.hub.failures import of_disk
from llorch_serve.hub.limits import UnusableAnswerError
from llorch_serve.hub.reference import Reference

_VARIABLE: Final = "MODELSCOPE_API_TOKEN"
_SET_TOKEN: Final = f"set {_VARIABLE}"


def usable_token() -> str:
    """Return the user's token, empty without one. Raises UsageError if it cannot be sent."""
    token = os.environ.get(_VARIABLE, "").strip()
    require_sendable(token, _VARIABLE)
    return token


def hub_address() -> str:
    """Return the hub's address as it may be shown."""
    from modelscope_hub import HubConfig

    return hide_credentials(str(HubConfig(token="").endpoint))


@contextlib.contextmanager
def told_failures(reference: Reference, note: str = "") -> Iterator[None]:
    """Raise what fails inside as an error of ours; ``note`` is added to what was found, in parentheses."""
    what = f"{reference} ({note})" if note else str(reference)
    try:
        yield
    except LlorchError:
        raise
    except Exception as error:
        found = _explained(error, what)
        if found is None:
            raise
        raise found from error


def _explained(error: Exception, what: str) -> LlorchError | None:
    from modelscope_hub import errors
    from requests import RequestException

    hub = hub_address()
    if isinstance(error, UnusableAnswerError):
        return HubError(f"{what}: {hub} {error}; check MODELSCOPE_ENDPOINT, and try again")
    if isinstance(error, errors.NotExistError):
        return ArtifactError(
            f"{what} does not exist at {hub}, or is private; check the name, or {_SET_TOKEN} if it is yours"
        )
    if isinstance(error, errors.APIError):
        return _of_status(error, what, hub)
    if isinstance(error, errors.FileIntegrityError):
        return HubError(
            f"a file of {what} came with another size or content than {hub} lists; nothing of it is kept; "
            "try again"
        )
    if isinstance(error, (errors.RequestTimeoutError, TimeoutError)):
        return HubError(f"{hub} does not answer in time for {what}; check the network, and try again")
    if isinstance(error, (ValueError, RecursionError)):  # requests has one that is of both kinds
        return HubError(f"{hub} gives no hub's answer for {what}; check MODELSCOPE_ENDPOINT and the proxy")
    if isinstance(error, (errors.NetworkError, RequestException)):
        return HubError(
            f"the exchange with {hub} about {what} failed ({type(error).__name__}); check the network and "
            "MODELSCOPE_ENDPOINT"
        )
    return of_disk(error, what, "MODELSCOPE_CACHE") if isinstance(error, OSError) else None


def _of_status(error: Any, what: str, hub: str) -> LlorchError:
    status = error.status_code or 0
    if status == 429:
        seconds = getattr(error, "retry_after", None)
        when = "later" if seconds is None else f"in {seconds:.0f} s"
        return HubError(f"{hub} limits how often it is asked, and refuses {what}; try again {when}")
    if status == 401:
        return HubError(f"{hub} does not accept the token for {what} (401); {_SET_TOKEN}")
    if status == 403:
        return HubError(
            f"{hub} forbids {what} (403): it is private or gated; ask for access there, then {_SET_TOKEN}"
        )
    if status >= 500:
        return HubError(f"{hub} fails with status {status} for {what}; try again later")
    return HubError(
        f"{hub} refuses {what} with status {status or 'none'}; check MODELSCOPE_ENDPOINT and the name"
    )
