"""Takes fields out of an OpenAPI document of llorch that end most requests made by chance: names of a model
that is not served, and what is refused whatever its value.

stdin: the document. stdout: the document without them. Used by ``ci/fuzz-http``.
"""

from __future__ import annotations

import json
import sys
from typing import Final

ENDING: Final = frozenset(
    {
        "audio",
        "background",
        "citations",
        "container",
        "context_management",
        "conversation",
        "encrypted_content",
        "file",
        "function_call",
        "functions",
        "image_url",
        "include",
        "input_audio",
        "max_tool_calls",
        "mcp_servers",
        "modalities",
        "model",
        "moderation",
        "prediction",
        "previous_response_id",
        "prompt_logprobs",
        "reasoning_effort",
        "refusal",
        "suffix",
        "truncation",
        "verbosity",
        "web_search_options",
    }
)


def main() -> None:
    """Read the document, and write it without those fields."""
    document = json.load(sys.stdin)
    for schema in document["components"]["schemas"].values():
        for name in ENDING & schema["properties"].keys() - set(schema.get("required", ())):
            del schema["properties"][name]
    json.dump(document, sys.stdout)


if __name__ == "__main__":
    main()
