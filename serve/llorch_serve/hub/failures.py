"""What goes wrong between a hub and its client, said in one sentence with what to do.

Input are the exceptions of huggingface_hub and of the HTTP library under it, which differ between their
versions; output is an error of ours. What a repository lacks is an ArtifactError; a hub that cannot be
reached, or that refuses, is a HubError, which may go away by itself or with a token.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from llorch_serve.errors import ArtifactError, HubError, LlorchError, ResourceError
from llorch_serve.hub.credentials import hide_credentials, hub_address
from llorch_serve.hub.limits import AnswerLimit, UnusableAnswerError
from llorch_serve.hub.patience import requested_pause
from llorch_serve.hub.reference import Reference
from llorch_serve.hub.watching import watched_client

_LOG_IN = "log in with 'hf auth login', or set HF_TOKEN"


@contextlib.contextmanager
def hub_failures(reference: Reference, note: str = "", limit: AnswerLimit | None = None) -> Iterator[None]:
    """Ask the hub inside: its client is watched, and what fails is raised as :func:`told_failures` does.

    limit: of what comes; None: of an answer that is no file.
    """
    with told_failures(reference, note), watched_client(limit or AnswerLimit()):
        yield


@contextlib.contextmanager
def told_failures(reference: Reference, note: str = "") -> Iterator[None]:
    """Raise what fails inside as an error of ours; ``note`` is added to what was found, in parentheses."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The root of the HTTP library's errors, whichever library the installed client is built on.
    transport: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except LlorchError:
        raise
    except HFValidationError as error:
        raise ArtifactError(
            f"{reference.repository} is no possible name of a repository; check it"
        ) from error
    except (transport, OSError, RuntimeError, ValueError) as error:
        raise explain(error, reference, note) from error


def explain(error: Exception, reference: Reference, note: str = "") -> LlorchError:
    """Return the error of ours that says what ``error`` means for ``reference``."""
    from huggingface_hub import errors

    cause = _cause(error)
    hub, repository = hub_address(), reference.repository
    what = f"{reference} ({note})" if note else str(reference)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return HubError(
            f"{what} needs the hub, but HF_HUB_OFFLINE forbids to ask {hub}; unset it, or put the files "
            f"into the cache first with: hf download {repository}"
        )
    if isinstance(cause, errors.GatedRepoError):
        return HubError(
            f"{what} is gated: {hub} gives it only to those who were granted access; ask for it at "
            f"{hub}/{repository}, then {_LOG_IN}"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return ArtifactError(
            f"{repository} has no revision {reference.revision or 'main'!r}; choose a branch, tag or commit "
            f"that is listed at {hub}/{repository}"
        )
    if isinstance(cause, errors.RepositoryNotFoundError):
        return ArtifactError(
            f"{what} does not exist at {hub}, or is private; check the name, or {_LOG_IN} if it is yours"
        )
    if isinstance(cause, errors.EntryNotFoundError) and not isinstance(cause, errors.LocalEntryNotFoundError):
        return ArtifactError(f"{what} has lost a file while it was fetched; try again")
    if isinstance(cause, UnusableAnswerError):
        return HubError(f"{what}: {hub} {cause}; nothing of it is kept; check HF_ENDPOINT, and try again")
    response = getattr(cause, "response", None)
    if response is not None:
        return _of_status(response, what, hub)
    return _of_transport(cause, what, hub)


def _cause(error: Exception) -> BaseException:
    """Return what made the client give up: it reports some failures as a file that is not in its cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    cause: BaseException = error
    while isinstance(cause, LocalEntryNotFoundError) and cause.__cause__ is not None:
        cause = cause.__cause__
    if type(cause) is RuntimeError and cause.__cause__ is not None:  # an upload's wrapping
        return cause.__cause__
    return cause


def _of_status(response: Any, what: str, hub: str) -> LlorchError:
    status = response.status_code
    if status == 429:
        return HubError(
            f"{hub} limits how often it is asked, and refuses {what}; try again {_after(response)}"
        )
    if status == 401:
        return HubError(f"{hub} does not accept the token for {what} (401); {_LOG_IN}")
    if status == 403:
        return HubError(f"{hub} forbids {what} with this token (403); use one that has the permission")
    if status >= 500:
        return HubError(f"{hub} fails with status {status} for {what}; try again later")
    return HubError(f"{hub} refuses {what} with status {status}; check HF_ENDPOINT and the name")


def _after(response: Any) -> str:
    """Say when a rate limit ends, from ``Retry-After`` or the client's own reading of ``RateLimit``."""
    seconds = requested_pause(response.headers)
    if seconds is None or seconds >= 10**7:
        return f"later, or {_LOG_IN}"
    return f"in {seconds} s, or {_LOG_IN} for a higher limit"


def of_disk(error: OSError, what: str, variable: str) -> LlorchError | None:
    """Return the error of ours for what a disk refuses; None if it was none.

    variable: which of the environment says where the cache is.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"the disk is full, so {what} cannot be kept; free some, or set {variable} to another"
        )
    if error.errno is not None and error.filename is not None:
        return ArtifactError(
            f"{error.filename} cannot be written or read: {error.strerror}; check its rights"
        )
    return None


def is_wrong_size(error: BaseException | None) -> bool:
    """Tell whether the client gave up because a file came with another size than it expected."""
    return isinstance(error, OSError) and str(error).startswith("Consistency check failed")


def _of_transport(cause: BaseException, what: str, hub: str) -> LlorchError:
    line = hide_credentials(str(cause).strip().split("\n", 1)[0].rstrip("."))[:300]
    if isinstance(cause, OSError) and (found := of_disk(cause, what, "HF_HOME")) is not None:
        return found
    if "Timeout" in type(cause).__name__:
        return HubError(f"{hub} does not answer in time for {what}; check the network, and try again")
    if is_wrong_size(cause):
        return HubError(
            f"a file of {what} came with another size than the hub says; nothing of it is kept; try again"
        )
    if isinstance(cause, ValueError):
        return HubError(f"{hub} gives no hub's answer for {what} ({line}); check HF_ENDPOINT and the proxy")
    return HubError(
        f"the exchange with {hub} about {what} failed: {line or type(cause).__name__}; check the network and "
        f"HF_ENDPOINT"
    )
