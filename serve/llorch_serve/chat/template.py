"""From a conversation to token ids, with the model's own chat template.

The template comes from the artifact, the messages from a request; ids and the rendered text go to the engine
and to ``Tokenize``. What users write is never a control token: see :func:`encode_chat`.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType

import jinja2

from llorch_serve.chat.roles import check_all_told, with_known_roles
from llorch_serve.chat.sandbox import MAX_CHARS, TemplateSandbox
from llorch_serve.chat.template_input import FIELD, TemplateInput, read_input
from llorch_serve.errors import ArtifactError, FieldViolation, InvalidRequestError
from llorch_serve.requests import ChatPrompt
from llorch_serve.text.control_tokens import ControlTokenGuard, Spot
from llorch_serve.text.stand_ins import StandIns
from llorch_serve.text.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = (
    2**17
)  # published ones have up to 2**15; compiling takes a second for 32 KiB of expressions
MAX_REASON_CHARS = 500  # of a template's own message

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
    other_tokens: further tokens that it is given, by names like ``pad_token``.
    now: the clock behind ``strftime_now``.
    Raises ArtifactError if the source is too large or no template.
    """

    def __init__(
        self,
        source: str,
        bos_token: str | None,
        eos_token: str | None,
        *,
        other_tokens: Mapping[str, str] = MappingProxyType({}),
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > MAX_TEMPLATE_BYTES:
            raise ArtifactError(f"the chat template has {size} bytes; expected at most {MAX_TEMPLATE_BYTES}")
        self._sandbox = TemplateSandbox(now)
        self._lock = threading.Lock()
        try:
            self._template = self._sandbox.compile_bounded(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError) as error:
            raise ArtifactError(
                f"the chat template cannot be compiled: {_reason(error)}. Correct it in the checkpoint and "
                f"export again."
            ) from error
        tokens = {**other_tokens, "bos_token": bos_token, "eos_token": eos_token}
        self._variables = {name: text for name, text in tokens.items() if text is not None}

    def render(self, seen: TemplateInput) -> str:
        """Return the conversation as the text that the model was trained on.

        A template that joins calls' arguments to text is given them as JSON text; others get objects. Where
        an answer has no content, it is given what it takes: nothing, none, or an empty text.
        Raises InvalidRequestError, with the template's own message where it has one.
        """
        with self._lock:
            if not seen.continue_final_message:
                return self._render(seen)
            # A mark at the end of the last message shows where to cut, and a space after it whether the
            # template trims.
            mark = f"CUT{secrets.token_hex(16)}"
            text = self._render(_with_mark(seen, f"{mark} "))
        head, found, tail = text.rpartition(mark)
        content = _final_text(seen).strip()
        if not found or content not in head:
            problem = (
                "the model's chat template does not write the last message as it is, so it cannot be gone "
                "on with"
            )
            raise InvalidRequestError([FieldViolation(f"{FIELD}.continue_final_message", problem)])
        return head if tail.startswith(" ") else head.rstrip()

    def _render(self, seen: TemplateInput) -> str:
        try:
            return self._run_forms(seen)
        except _TEMPLATE_FAULTS as error:
            problem = f"the model's chat template refused the conversation: {_reason(error)}"
            raise InvalidRequestError([FieldViolation(FIELD, problem)]) from error

    def _run_forms(self, seen: TemplateInput) -> str:
        """Render the first of the conversation's forms that the template takes and writes all calls of."""
        silent_calls = seen.calls_without_content()
        told: str | None = None
        fault: Exception | None = None
        for form in seen.forms():
            try:
                text = self._run(form)
            except (TypeError, jinja2.UndefinedError) as error:
                fault = fault or error
                continue
            if all(name in text for name in silent_calls):
                return text
            told = text if told is None else told
        if told is not None:
            return told
        assert fault is not None
        raise fault

    def _run(self, seen: TemplateInput) -> str:
        pieces: list[str] = []
        size = 0
        self._sandbox.start()
        variables = {
            **self._variables,
            **seen.arguments,
            "messages": seen.messages,
            "tools": seen.tools,
            "documents": seen.documents,
            "add_generation_prompt": seen.add_generation_prompt,
        }
        for piece in self._template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_CHARS:
                raise jinja2.TemplateError(f"the text has more than {MAX_CHARS} characters")
        return "".join(pieces)


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, prompt: ChatPrompt, *, most: int, most_chars: int
) -> tuple[tuple[int, ...], str]:
    """Return the ids of a conversation that is open for the assistant's answer, and the rendered text.

    Special tokens that the template writes become control tokens. BOS comes first once: if the tokenizer adds
    one to texts and the template wrote none, it is added. Unless the prompt allows it, no control token is
    made, in whole or in part, of messages, tools, documents or arguments, whatever the template or the
    tokenizer's normaliser does to them. Only a role that is a word may complete one that the template writes
    around it.

    most: tokens of the context. most_chars: of the rendered text, which else is refused before it is encoded.
    Raises InvalidRequestError if a field is bad, or the template refuses the conversation.
    """
    seen = with_known_roles(template.render, read_input(prompt))
    text = template.render(seen)
    check_all_told(template.render, seen, text, [message.role for message in prompt.messages])
    if len(text) > most_chars:
        found = (
            f"found {len(text)} characters behind the chat template; the context holds {most} tokens, "
            f"expected at most {most_chars}"
        )
        raise InvalidRequestError([FieldViolation(FIELD, found)])
    tokenizer.check_fits(text, most, field=FIELD)
    if prompt.allow_control_tokens:
        return tokenizer.started(tokenizer.encode(text, add_special_tokens=False, field=FIELD)), text
    guard = tokenizer.guard
    text, written = _written(guard, template, seen, text)
    ids = tokenizer.encode(text, add_special_tokens=False, field=FIELD)
    spots = guard.spots(text)
    # A normaliser or the tokenizer's model may make one, too, where no text spells it out.
    if spots != written or guard.controls(ids) != guard.controls([spot.token_id for spot in spots]):
        ids = guard.encode(text, written, FIELD)
    return tokenizer.started(ids), text


def _written(
    guard: ControlTokenGuard, template: ChatTemplate, seen: TemplateInput, text: str
) -> tuple[str, list[Spot]]:
    """Return the rendered text, and where the template, and nobody else, has written special tokens into it.

    The conversation is rendered again with stand-ins for all characters, then with stand-ins for those of
    special tokens alone, for templates that look for words. Where every rendering differs, as the template
    looks for marks that a user wrote, the text is as it was if the template has still written the same
    tokens, and else the one that it made of the stand-ins.
    """
    spots = guard.spots(text)
    stand_ins = guard.stand_ins.avoiding((text, *seen.texts()))
    if stand_ins is None:
        problem = (
            "found characters of too many planes of Unicode; expected text that leaves two of planes 4 to "
            "16 unused"
        )
        raise InvalidRequestError([FieldViolation(FIELD, problem)])
    rendered_again = None
    for replaced in (
        seen.changed(stand_ins.replace_all, stand_ins.replace_in_key),
        seen.changed(stand_ins.replace_special, stand_ins.replace_in_key),
    ):
        try:
            rendered_again = template.render(replaced)
        except InvalidRequestError:
            continue
        if stand_ins.restore(rendered_again) == text:
            own = _own(guard, stand_ins, rendered_again)
            return text, [spot for spot in own if spot in spots or not guard.stands_alone(spot)]
    if rendered_again is None:
        problem = "the model's chat template cannot tell its control tokens from the conversation's text"
        raise InvalidRequestError([FieldViolation(FIELD, problem)])
    own = _own(guard, stand_ins, rendered_again)
    if [spot.token_id for spot in own] == [spot.token_id for spot in spots]:
        return text, spots
    return stand_ins.restore(rendered_again), own


def _own(guard: ControlTokenGuard, stand_ins: StandIns, rendered_again: str) -> list[Spot]:
    """Return where a rendering with stand-ins spells out special tokens, as places of the restored text."""
    places, end, length = [], 0, 0
    for spot in guard.spots(rendered_again):
        found = rendered_again[spot.start : spot.end]
        if stand_ins.restore(found) != found:
            continue  # a normaliser dropped the stand-ins inside
        length += len(stand_ins.restore(rendered_again[end : spot.start]))
        places.append(Spot(spot.token_id, length, length + len(found)))
        length, end = length + len(found), spot.end
    return places


def _with_mark(seen: TemplateInput, mark: str) -> TemplateInput:
    *others, last = seen.messages
    content = last["content"]
    if isinstance(content, list):
        *parts, final = content
        longer: object = [*parts, final | {"text": final["text"] + mark}]
    else:
        longer = content + mark
    return replace(seen, messages=[*others, last | {"content": longer}])


def _final_text(seen: TemplateInput) -> str:
    content = seen.messages[-1]["content"]
    text: str = content[-1]["text"] if isinstance(content, list) else content
    return text


def _reason(error: BaseException) -> str:
    words = " ".join(str(error).split())[:MAX_REASON_CHARS]
    if isinstance(error, jinja2.TemplateError) and words:
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
