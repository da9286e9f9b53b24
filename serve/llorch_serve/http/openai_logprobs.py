"""Log-probabilities in OpenAI's two shapes: a list of places for chats, columns for completions.

Input: what updates carry. Output: dictionaries that become JSON.
"""

from __future__ import annotations

from typing import Any

from llorch_serve.requests import GenerationUpdate
from llorch_serve.sampling.logprobs import TokenLogprob, TokenLogprobs


def chat_logprobs(places: tuple[TokenLogprobs, ...]) -> dict[str, Any]:
    """Return the shape of /v1/chat/completions."""
    content = [
        _token(place.chosen) | {"top_logprobs": [_token(other) for other in place.top]} for place in places
    ]
    return {"content": content, "refusal": None}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}


class Columns:
    """One choice's columns for /v1/completions; the places of its text go on from chunk to chunk."""

    def __init__(self) -> None:
        self._offset = 0

    def of(self, update: GenerationUpdate) -> dict[str, Any]:
        """Return the shape of /v1/completions, with the prompt's tokens where they are told (echo).

        The prompt's first token has no log-probability. ``text_offset`` is where a token begins in the
        choice's text, in characters.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        if update.prompt_logprobs:
            known = sum(len(place.chosen.text) for place in (*update.prompt_logprobs, *update.logprobs))
            tokens.append(update.text[: max(0, len(update.text) - known)])
            logprobs.append(None)
            tops.append(None)
            offsets.append(0)
            self._offset = len(tokens[0])
        for place in (*update.prompt_logprobs, *update.logprobs):
            tokens.append(place.chosen.text)
            logprobs.append(place.chosen.logprob)
            # Tokens may share a text, as parts of characters do; the likeliest of them counts.
            tops.append({other.text: other.logprob for other in reversed(place.top)})
            offsets.append(self._offset)
            self._offset += len(place.chosen.text)
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}
