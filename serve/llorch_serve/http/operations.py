"""Every operation of the HTTP front: what it takes and what it answers. The routes of ``app.py``,
/openapi.json and the metrics' names of routes are made of it.

Input: the structures that bodies are read as. A test holds this table to the routes that are served, and each
operation's fields to those that its route reads.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

import msgspec

from llorch_serve.http.batches.reading import BATCHES, FILES, BatchBody
from llorch_serve.http.batches.uploads import FORM
from llorch_serve.http.embedding_routes import EmbeddingsBody
from llorch_serve.http.job_routes import CancelBody, JobBody
from llorch_serve.http.messages.schema import CountBody, MessagesBody
from llorch_serve.http.openai_schema import ChatBody, CompletionBody
from llorch_serve.http.page import PAGE_PATHS
from llorch_serve.http.rank_routes import RerankBody
from llorch_serve.http.responses.schema import ResponsesBody
from llorch_serve.http.score_routes import ScoreBody
from llorch_serve.http.token_routes import DetokenizeBody, TokenizeBody


class Answers(enum.Enum):
    """The media types of an answer."""

    JSON = ("application/json",)
    JSON_OR_EVENTS = ("application/json", "text/event-stream")
    EVENTS = ("text/event-stream",)
    TEXT = ("text/plain",)
    FILE = ("text/html", "text/javascript", "text/css")
    BYTES = ("application/octet-stream",)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. path: as OpenAPI writes it, names in braces. body: what its body is read as.

    query: names that its query may have. form: names of the fields of its form, where that is its body.
    """

    method: str
    path: str
    summary: str
    answers: Answers = Answers.JSON
    body: type[msgspec.Struct] | None = None
    status: int = 200
    query: tuple[str, ...] = ()
    form: tuple[str, ...] = ()


OPERATIONS: Final = (
    Operation("POST", "/v1/chat/completions", "Answer a chat", Answers.JSON_OR_EVENTS, ChatBody),
    Operation("POST", "/v1/completions", "Go on with a text", Answers.JSON_OR_EVENTS, CompletionBody),
    Operation("POST", "/v1/responses", "Answer items", Answers.JSON_OR_EVENTS, ResponsesBody),
    Operation("POST", "/v1/responses/input_tokens", "Count the tokens of items", body=ResponsesBody),
    Operation("GET", "/v1/responses/{response_id}", "Fetch an answer that is kept"),
    Operation("DELETE", "/v1/responses/{response_id}", "Let go of an answer that is kept"),
    Operation("POST", "/v1/messages", "Answer messages of blocks", Answers.JSON_OR_EVENTS, MessagesBody),
    Operation("POST", "/v1/messages/count_tokens", "Count the tokens of messages", body=CountBody),
    Operation("POST", "/v1/score", "Tell how likely continuations of a context are", body=ScoreBody),
    Operation("POST", "/v1/embeddings", "Give a vector for each text", body=EmbeddingsBody),
    Operation("POST", "/v1/rerank", "Order documents by their relevance to a query", body=RerankBody),
    Operation("GET", "/v1/files", "List files", query=FILES.known),
    Operation("POST", "/v1/files", "Send a file", form=FORM),
    Operation("GET", "/v1/files/{file_id}", "Describe a file"),
    Operation("DELETE", "/v1/files/{file_id}", "Delete a file"),
    Operation("GET", "/v1/files/{file_id}/content", "Read a file", Answers.BYTES),
    Operation("GET", "/v1/batches", "List batches", query=BATCHES.known),
    Operation("POST", "/v1/batches", "Answer the lines of a file", body=BatchBody),
    Operation("GET", "/v1/batches/{batch_id}", "Describe a batch"),
    Operation("POST", "/v1/batches/{batch_id}/cancel", "End a batch"),
    Operation("POST", "/tokenize", "Turn a text or a chat into token ids", body=TokenizeBody),
    Operation("POST", "/detokenize", "Turn token ids into a text", body=DetokenizeBody),
    Operation("GET", "/v1/models", "List the model"),
    Operation("GET", "/v1/models/{model_id}", "Describe the model"),
    Operation("POST", "/v1/inference", "Run a job", Answers.EVENTS, JobBody),
    Operation("POST", "/execute", "Run a job", Answers.EVENTS, JobBody),
    Operation("POST", "/cancel", "End a job", body=CancelBody, status=202),
    Operation("GET", "/health", "Tell whether requests are taken"),
    Operation("GET", "/load", "Tell how busy the worker is"),
    Operation("GET", "/metrics", "Give Prometheus' text", Answers.TEXT),
    Operation("GET", "/openapi.json", "Describe all of this"),
    *(Operation("GET", path, "A file of the page", Answers.FILE) for path in PAGE_PATHS),
)

_NAME: Final = re.compile(r"\{[a-z_]+\}")
_PATHS: Final = frozenset(operation.path for operation in OPERATIONS)
_NAMED: Final = {
    # A model's name may hold slashes.
    re.compile(_NAME.sub("[^/]+", path.replace("{model_id}", ".*"))): _NAME.sub("ID", path)
    for path in _PATHS
    if "{" in path
}


def route_of(path: str) -> str:
    """Return the route of a path for metrics, which must not grow with what people ask for."""
    if path in _PATHS and "{" not in path:
        return path
    named = (route for pattern, route in _NAMED.items() if pattern.fullmatch(path))
    return max(named, key=len, default="other")
