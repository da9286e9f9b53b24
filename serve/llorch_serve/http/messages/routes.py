"""Routes of Anthropic's Messages API.

Input: bodies of /v1/messages and /v1/messages/count_tokens. Output: answers of the model, and counts of
tokens.
"""

from __future__ import annotations

from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from llorch_serve.calls.callers import Caller
from llorch_serve.http.exchange import Exchange
from llorch_serve.http.ignored_fields import noting
from llorch_serve.http.messages.answers import MessageAnswer
from llorch_serve.http.messages.errors import error_body
from llorch_serve.http.messages.reading import read_count, read_message
from llorch_serve.http.problems import HttpError
from llorch_serve.http.prompt_bodies import count_tokens
from llorch_serve.http.service import Computation
from llorch_serve.http.translated.answering import TranslatedDialect
from llorch_serve.http.unknown_fields import UnknownFields
from llorch_serve.requests import ModelInfo, TextGenerator

VERSIONS: Final = ("2026-10-21", "2023-06-01")
"""Versions of the API whose answers have these shapes. The newer one has no ``temperature``, ``top_p`` and
``top_k``, which are taken with both.
"""


def versioned(inner: ASGIApp) -> ASGIApp:
    """Return the same endpoint, for requests for a version of the API that is served here."""

    class Versioned:
        """Passes requests on. Raises HttpError for another version."""

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            asked = Exchange(scope, receive, send).header("anthropic-version")
            if asked not in (None, *VERSIONS):
                expected = " or ".join(VERSIONS)
                found = f"anthropic-version is {asked[:32]!r}, expected {expected}; send that, or none"
                raise HttpError(400, "unsupported_version", found)
            await inner(scope, receive, send)

    return Versioned()


def messages_dialect(unknown: UnknownFields) -> TranslatedDialect:
    """Return the dialect of POST /v1/messages. unknown: what becomes of fields that it does not know."""
    return TranslatedDialect(noting(read_message, unknown), MessageAnswer, error_body)


def counting(unknown: UnknownFields) -> Computation:
    """Return what counts the tokens that the model would be given, for POST /v1/messages/count_tokens."""
    read = noting(read_count, unknown)

    def count(raw: bytes, generator: TextGenerator, info: ModelInfo, caller: Caller) -> dict[str, Any]:
        return {"input_tokens": count_tokens(read(raw, info, caller), generator)}

    return count
