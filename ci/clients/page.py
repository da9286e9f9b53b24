"""docs/clients.md, from what the clients showed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from clients.table import Shown

COLUMNS: Final = (
    "plain",
    "streamed",
    "tools",
    "parallel tools",
    "structured output",
    "usage",
    "cancel",
    "error",
)
HEAD: Final = """\
# Clients

After this page you know which clients work against a worker as they are, and how that was shown.

<!-- not run: it installs all clients -->
```console
$ ci/test-clients
$ ci/test-clients "openai (Python)" curl
```

The page is written by the first of these commands. Each client has an environment of its own with the
pinned packages, and two workers: one serves SmolLM2-135M-Instruct in fp32, the other a tiny model whose
thoughts, calls and answers are known. Nothing is changed in a client but its base URL. **plain** to
**error**: a chat; the same streamed; a call of a function and, but with instructor, llama-index and
smolagents, the answer to its result; two calls in one answer; an answer held to a JSON schema; counts of
tokens; a stream that the client leaves, after which the worker is idle; a refusal that the client shows with
the field's name. A hyphen: the client has no such thing, or it was not tried.

"""

TAIL: Final = """
## Refused, and why

- Images, audio and files in messages: the models that are served read text. The error names the part.
- `functions` and `function_call`, which `tools` replaced; `prediction`, `suffix`, `web_search_options`,
  `verbosity`: nothing here can do what they ask for. [All fields](http.md#openais-fields).
- What llorch does not know is refused by its name, unless the worker was started with
  [`--unknown-fields ignore`](http.md#fields-that-llorch-does-not-know).
- Open WebUI is not run here: it pins 109 packages, among them other versions of onnxruntime and transformers.
  It asks for `/v1/models` and streams `/v1/chat/completions`, as the clients above do; its container reaches
  a worker by [`--allowed-host host.docker.internal`](http.md#names-hosts-and-browsers).
"""


def written(found: Sequence[Shown]) -> str:
    """Return the page."""
    lines = [HEAD, *_table(found), "\n## Beyond\n\n", *_beyond(found), TAIL]
    return "".join(lines)


def _table(found: Iterable[Shown]) -> Iterable[str]:
    yield f"| client | packages | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}\n"
    for shown in found:
        # A script that broke off did not come to show what its client lacks.
        held = dict.fromkeys(COLUMNS, False) if shown.failure else {}
        held |= {row["row"]: bool(row["holds"]) for row in shown.rows}
        marks = ("-" if name not in held else "yes" if held[name] else "**no**" for name in COLUMNS)
        packages = ", ".join(f"`{package}`" for package in shown.client.packages) or "the system's"
        yield f"| {shown.client.name} | {packages} | {' | '.join(marks)} |\n"


def _beyond(found: Iterable[Shown]) -> Iterable[str]:
    for shown in found:
        names = [row["row"] for row in shown.rows if row["row"] not in COLUMNS and row["holds"]]
        if names:
            yield f"- {shown.client.name}: {', '.join(names)}.\n"
