"""What a person needs once a worker serves: where it is, a call to try, and a page to open.

Shown on a terminal alone; whoever reads a log needs none of it. Input: the addresses, and what they ask of
callers. Output: three lines.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from llorch_serve.observe.logs import writes_json

_ANYWHERE = ("0.0.0.0", "[::]")  # noqa: S104 - compared, not bound


@dataclass(frozen=True, slots=True)
class Welcome:
    """What the lines are made of.

    address: HOST:PORT of gRPC. http: the HTTP front's URL without a path; None: there is none.
    has_chat: the model has a chat template. asks_token: callers must show a token. embeds: the model gives
    vectors of texts, and no answers.
    """

    address: str
    http: str | None
    has_chat: bool
    asks_token: bool
    embeds: bool = False

    def lines(self) -> tuple[str, str, str]:
        """Return the three lines."""
        if self.http is None:
            asked = f"{'--chat Hello' if self.has_chat else '--prompt Once'} --max-tokens 32"
            command, asked = ("embed", "--text Hello") if self.embeds else ("generate", asked)
            return (
                f"  address  {_reachable(self.address)} (gRPC)",
                f"  try      llorch {command} --connect {_reachable(self.address)} {asked}",
                "  page     none; add --http 8080 for OpenAI's API and a page to chat",
            )
        url = _reachable(self.http)
        path, body = "completions", '{"prompt": "Once", "max_tokens": 32}'
        if self.embeds:
            path, body = "embeddings", '{"input": "Hello"}'
        elif self.has_chat:
            path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}'
        shown = ' -H "Authorization: Bearer $LLORCH_API_TOKEN"' if self.asks_token else ""
        return (
            f"  address  {url}/v1 (OpenAI's API), {_reachable(self.address)} (gRPC)",
            f"  try      curl {url}/v1/{path} -H 'Content-Type: application/json'{shown} -d '{body}'",
            f"  page     {url}/",
        )


def is_wanted() -> bool:
    """Tell whether a person reads what is printed."""
    return sys.stderr.isatty() and not writes_json()


def _reachable(address: str) -> str:
    """Return an address that can be called from this machine, where it stands for all of them."""
    for anywhere in _ANYWHERE:
        address = address.replace(f"{anywhere}:", "127.0.0.1:")
    return address
