"""Log-probabilities in OpenAI's two shapes: a list of places for chats, columns for completions.

Input: what updates carry. Output: dictionaries that become JSON. A token that ends or begins inside a
character has no text of its own; where it stands alone, it is named by its bytes.
"""

from __future__ import annotations

import codecs
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
    return {"token": _name(token, ""), "logprob": token.logprob, "bytes": list(token.raw) or None}


def _name(token: TokenLogprob, prefix: str) -> str:
    """Return a token's text, or behind a prefix its bytes where it is not whole characters."""
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in token.raw)


class Columns:
    """One choice's columns for /v1/completions; the places of its text go on from chunk to chunk."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = _decoder()

    def of(self, update: GenerationUpdate) -> dict[str, Any]:
        """Return the shape of /v1/completions, with the prompt's tokens where they are told (echo).

        The prompt's first token has no log-probability. Joined, the tokens are the choice's text: of those
        that share a character the last one has it, and the others are empty. ``text_offset`` is where a
        token begins in the text, in characters: inside of a character, where that one begins. A stop token
        comes last, by its name, where the text ends: clients take the last place for the generated token.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        places = (*update.prompt_logprobs, *update.logprobs)
        if update.prompt_logprobs:
            known = len(_decoder().decode(b"".join(place.chosen.raw for place in places)))
            tokens.append(update.text[: max(0, len(update.text) - known)])
            logprobs.append(None)
            tops.append(None)
            offsets.append(0)
            self._offset = len(tokens[0])
        for index, place in enumerate(places):
            ends = update.completion is not None and index == len(places) - 1
            text = self._decoder.decode(place.chosen.raw, ends)
            tokens.append(text)
            logprobs.append(place.chosen.logprob)
            tops.append(_alternatives(place, text))
            offsets.append(self._offset)
            self._offset += len(text)
        if update.completion is not None and (stop := update.completion.stop_logprobs) is not None:
            name = _name(stop.chosen, "bytes:")
            tokens.append(name)
            logprobs.append(stop.chosen.logprob)
            tops.append(_alternatives(stop, name))
            # What the text has of a character that has not ended comes before it.
            offsets.append(self._offset + len(self._decoder.decode(b"", final=True)))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _alternatives(place: TokenLogprobs, chosen: str) -> dict[str, float]:
    """Return the likeliest tokens of a place by their texts; chosen: that of the token there.

    Where tokens share a text, the likeliest of them counts.
    """
    return {
        chosen if other.token_id == place.chosen.token_id else _name(other, "bytes:"): other.logprob
        for other in reversed(place.top)
    }


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")
