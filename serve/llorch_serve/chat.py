"""From a conversation to token ids, with the model's own chat template.

The template comes from the artifact, the messages from a request; ids and the rendered text go to the engine and to
``Tokenize``. What users write is never a control token: see :func:`encode_chat`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

import jinja2

from llorch_serve.errors import ArtifactError, FieldViolation, InvalidRequestError
from llorch_serve.requests import ChatMessage
from llorch_serve.sandbox import MAX_CHARS, TemplateSandbox
from llorch_serve.text import Tokenizer, check_text

MAX_TEMPLATE_BYTES = 2**20
MAX_REASON_CHARS = 500  # of a template's own message
FIELD = "input.chat"

# What Python raises when a template and a conversation do not fit together.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled chat template. Safe to use from many threads; one renders at a time.

    source: jinja2, as in tokenizer_config.json or GGUF's ``tokenizer.chat_template``.
    bos_token, eos_token: their texts, given to the template; None: undefined there.
    now: the clock behind ``strftime_now``.
    Raises ArtifactError if the source is too large or no template.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None,
        eos_token: str | None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > MAX_TEMPLATE_BYTES:
            raise ArtifactError(f"the chat template has {size} bytes; expected at most {MAX_TEMPLATE_BYTES}")
        self._sandbox = TemplateSandbox(now)
        self._lock = threading.Lock()
        try:
            self._template = self._sandbox.compile_bounded(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise ArtifactError(
                f"the chat template cannot be compiled: {_reason(error)}. Correct it in the checkpoint and export again."
            ) from error
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._variables = {name: text for name, text in tokens.items() if text is not None}

    def render(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        """Return the conversation as the text that the model was trained on.

        add_generation_prompt: end with the opening of the assistant's answer.
        Raises InvalidRequestError, with the template's own message where it has one.
        """
        pieces: list[str] = []
        size = 0
        with self._lock:
            self._sandbox.start()
            try:
                for piece in self._template.generate(
                    messages=[_as_dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    tools=None,
                    documents=None,
                    **self._variables,
                ):
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_CHARS:
                        raise jinja2.TemplateError(f"the text has more than {MAX_CHARS} characters")
            except _TEMPLATE_FAULTS as error:
                problem = f"the model's chat template refused the conversation: {_reason(error)}"
                raise InvalidRequestError([FieldViolation(FIELD, problem)]) from error
        return "".join(pieces)


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[ChatMessage]
) -> tuple[tuple[int, ...], str]:
    """Return the ids of a conversation that is open for the assistant's answer, and the rendered text.

    Special tokens that the template writes, BOS included, become control tokens; the tokenizer adds none. A special
    token's text inside a role or content is encoded as plain text. That covers each role and content by itself, not a
    special token's text that arises only where the template joins two strings, or edits one.

    Raises InvalidRequestError if the template refuses the conversation or a text is not valid Unicode.
    """
    for index, message in enumerate(messages):
        check_text(message.role, f"{FIELD}.messages[{index}].role")
        check_text(message.content or "", f"{FIELD}.messages[{index}].content")
    if not any(tokenizer.special_pattern.search(text) for text in _texts(messages)):
        text = template.render(messages)
        return tokenizer.encode(text, add_special_tokens=False, field=FIELD), text
    marker = tokenizer.guard.marker

    def mark(text: str) -> str:
        return tokenizer.special_pattern.sub(lambda found: marker + found[0], text)

    marked = template.render(
        [
            replace(m, role=mark(m.role), content=None if m.content is None else mark(m.content))
            for m in messages
        ]
    )
    # A template that writes JSON in ASCII has written the marker so, too.
    marked = marked.replace(json.dumps(marker)[1:-1], marker)
    return tokenizer.guard.encode(marked, FIELD), marked.replace(marker, "")


def _texts(messages: Sequence[ChatMessage]) -> Iterable[str]:
    for message in messages:
        yield message.role
        yield message.content or ""


def _as_dict(message: ChatMessage) -> dict[str, str]:
    # Templates test whether a key is there; a None would be printed as "None".
    content = {} if message.content is None else {"content": message.content}
    return {"role": message.role} | content


def _reason(error: BaseException) -> str:
    words = " ".join(str(error).split())[:MAX_REASON_CHARS]
    if isinstance(error, jinja2.TemplateError) and words:
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
