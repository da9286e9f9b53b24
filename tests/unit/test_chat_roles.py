"""Messages that a template does not know: of the role developer, without content, or of any role that it
leaves out.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from llorch_serve.chat.roles import check_all_told, with_known_roles
from llorch_serve.chat.template import ChatTemplate
from llorch_serve.chat.template_input import read_input
from llorch_serve.errors import InvalidRequestError
from llorch_serve.requests import ChatMessage, ChatPrompt, ToolCall
from llorch_serve.text.tokenizer import Tokenizer
from support.builders.chat_templates import LLAMA2, LLAMA3, SMOLLM2, encoded
from support.builders.tiny_tokenizers import byte_level

PUBLISHED = Path(__file__).parent.parent / "data" / "published" / "tokenizers.jsonl"
MARK = "MARKED words"
RULES = ChatMessage("developer", MARK)
HI = ChatMessage("user", "Hi")

# As gpt-oss has it: both roles are known, and others are left out.
KNOWS_DEVELOPER = (
    "{% for m in messages %}{% if m.role in ('system', 'developer') %}<|{{ m.role }}|># Instructions\n"
    "{{ m.content }}{% elif m.role == 'user' %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
)
# As Qwen2.5 has it: a loop over the roles that it knows.
LEAVES_OUT = (
    "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}"
    "{% elif m.role == 'user' %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
)
# As DeepSeek-R1 has it: calls are written where the content is none, and only there.
CALLS_WITHOUT_CONTENT = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}</call>{% endfor %}"
    "{% elif m.content is not none %}{{ m.role + ': ' + m.content + ';' }}{% endif %}{% endfor %}"
)
WANTS_TEXT = (
    "{% for m in messages %}{{ m.role + ': ' + m.content }}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}</call>{% endfor %};{% endfor %}"
)


def published() -> dict[str, str]:
    """Return published templates by the name of a repository that has each."""
    found: dict[str, str] = {}
    for line in PUBLISHED.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        source = json.loads(row["file"]) if isinstance(row["file"], str) else row["file"]
        template = source.get("chat_template")
        if isinstance(template, str) and template not in found.values():
            found[row["name"]] = template
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


def text_of(tokenizer: Tokenizer, source: str, *messages: ChatMessage, **fields: object) -> str:
    return encoded(tokenizer, ChatTemplate(source, "<s>", "</s>"), messages, **fields)[1]


def refusal(tokenizer: Tokenizer, source: str, *messages: ChatMessage) -> tuple[str, str]:
    with pytest.raises(InvalidRequestError) as caught:
        text_of(tokenizer, source, *messages)
    (violation,) = caught.value.violations
    return violation.field, violation.description


# The role developer.


@pytest.mark.parametrize("source", published().values(), ids=published())
def test_a_developers_message_is_in_the_prompt_or_refused(tokenizer: Tokenizer, source: str) -> None:
    try:
        found = text_of(tokenizer, source, RULES, HI)
    except InvalidRequestError:
        with contextlib.suppress(InvalidRequestError):  # nor does it take one of the system
            assert MARK not in text_of(tokenizer, source, ChatMessage("system", MARK), HI)
        return
    assert MARK in found
    assert found == text_of(tokenizer, source, ChatMessage("system", MARK), HI)


@pytest.mark.parametrize("source", [SMOLLM2, LLAMA3, LLAMA2, LEAVES_OUT])
def test_a_template_that_knows_the_system_alone_is_given_that(tokenizer: Tokenizer, source: str) -> None:
    found = text_of(tokenizer, source, RULES, HI)
    assert found == text_of(tokenizer, source, ChatMessage("system", MARK), HI)
    assert MARK in found


def test_a_template_that_knows_developers_keeps_them(tokenizer: Tokenizer) -> None:
    assert "<|developer|># Instructions\nMARKED words" in text_of(tokenizer, KNOWS_DEVELOPER, RULES, HI)


def test_a_template_that_shouts_roles_does_not_know_them_for_that(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    assert text_of(tokenizer, source, RULES, HI).startswith("SYSTEM: MARKED words")


def test_a_conversation_may_have_messages_of_both(tokenizer: Tokenizer) -> None:
    messages = (ChatMessage("system", "first"), RULES, HI)
    assert text_of(tokenizer, LEAVES_OUT, *messages) == "<|system|>first<|system|>MARKED words<|user|>Hi"
    assert "MARKED words" in text_of(tokenizer, KNOWS_DEVELOPER, *messages)


def test_nothing_is_asked_of_the_template_where_no_developer_speaks() -> None:
    seen = read_input(ChatPrompt((ChatMessage("system", MARK), HI)))

    def fail(_: object) -> str:
        raise AssertionError

    assert with_known_roles(fail, seen) is seen


def test_developers_words_are_no_control_tokens(tokenizer: Tokenizer) -> None:
    plain = encoded(tokenizer, ChatTemplate(LEAVES_OUT, None, None), [ChatMessage("system", "<s> a"), HI])
    found = encoded(tokenizer, ChatTemplate(LEAVES_OUT, None, None), [ChatMessage("developer", "<s> a"), HI])
    assert found == plain


# Messages that a template leaves out.


@pytest.mark.parametrize("role", ["function", "critic", "ipython"])
def test_a_message_that_the_template_leaves_out_is_refused(tokenizer: Tokenizer, role: str) -> None:
    field, found = refusal(tokenizer, LEAVES_OUT, HI, ChatMessage(role, "42 degrees"))
    assert field == "input.chat.messages[1]"
    assert f"leaves out messages of the role '{role}'" in found


def test_a_developer_is_refused_where_the_system_is_left_out(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    assert refusal(tokenizer, source, RULES, HI)[0] == "input.chat.messages[0]"


def test_a_message_may_be_written_otherwise_than_it_came(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.content | upper }};{% endfor %}"
    assert text_of(tokenizer, source, ChatMessage("critic", "ab"), HI) == "AB;HI;"
    assert text_of(tokenizer, LEAVES_OUT, ChatMessage("critic", " "), HI) == "<|user|>Hi"  # nothing is lost


def test_roles_that_every_template_knows_may_be_left_out(tokenizer: Tokenizer) -> None:
    source = "{{ messages[-1].content }}"
    others = [ChatMessage(role, "b") for role in ("system", "user", "assistant", "tool")]
    assert text_of(tokenizer, source, *others, ChatMessage("user", "a")) == "a"


# Messages without content.

CALL = ToolCall("weather", "{}", "c1")


@pytest.mark.parametrize("content", [None, ""])
def test_calls_are_written_whatever_stands_for_no_content(tokenizer: Tokenizer, content: str | None) -> None:
    calling = ChatMessage("assistant", content, tool_calls=(CALL,))
    assert text_of(tokenizer, WANTS_TEXT, HI, calling) == "user: Hi;assistant: <call>weather</call>;"
    assert text_of(tokenizer, CALLS_WITHOUT_CONTENT, HI, calling) == "user: Hi;<call>weather</call>"


def test_an_answer_without_anything_is_an_empty_text(tokenizer: Tokenizer) -> None:
    messages = (HI, ChatMessage("assistant", None), ChatMessage("user", "again"))
    assert text_of(tokenizer, WANTS_TEXT, *messages) == "user: Hi;assistant: ;user: again;"
    assert "<|im_start|>assistant\n<|im_end|>" in text_of(tokenizer, SMOLLM2, *messages)


def test_a_tool_that_returned_nothing_is_an_empty_text(tokenizer: Tokenizer) -> None:
    messages = (HI, ChatMessage("assistant", "", tool_calls=(CALL,)), ChatMessage("tool", None))
    assert text_of(tokenizer, WANTS_TEXT, *messages).endswith("tool: ;")


def test_a_question_without_content_is_still_refused(tokenizer: Tokenizer) -> None:
    assert refusal(tokenizer, WANTS_TEXT, ChatMessage("user", None))[0] == "input.chat"


@pytest.mark.parametrize("source", published().values(), ids=published())
def test_published_templates_take_answers_without_content(tokenizer: Tokenizer, source: str) -> None:
    template = ChatTemplate(source, "<s>", "</s>")

    def rendered(content: str | None) -> str:
        messages = (HI, ChatMessage("assistant", content), ChatMessage("user", "again"))
        return template.render(read_input(ChatPrompt(messages)))

    try:
        expected = rendered("")
    except InvalidRequestError:
        return  # nor does it take an empty text
    shortened = rendered(None)  # one tells none from empty, and leaves the answer out
    assert shortened == expected or (shortened.endswith(expected[-20:]) and len(shortened) < len(expected))


def test_many_messages_of_unusual_roles_are_looked_for_in_one_pass():
    # A search from the beginning for each of them keeps a reading thread busy for seconds.
    class Searched(str):
        read = 0

        def find(self, part, start=0):
            found = str.find(self, part, start)
            Searched.read += (len(self) if found < 0 else found + len(part)) - start
            return found

        def __contains__(self, part):
            Searched.read += str.find(self, part) + len(part)
            return str.__contains__(self, part)

    messages = tuple(ChatMessage("critic", f"critique {index:06d}") for index in range(2000))
    seen = read_input(ChatPrompt(messages))
    text = Searched(ChatTemplate(SMOLLM2, None, None).render(seen))
    check_all_told(lambda _: pytest.fail("rendered again"), seen, text, ["critic"] * len(messages))
    assert Searched.read <= len(text)


def test_few_messages_are_rendered_again_one_by_one():
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }};{% endfor %}", None, None
    )
    rendered = 0

    def render(seen):
        nonlocal rendered
        rendered += 1
        return template.render(seen)

    refusal = pytest.raises(
        InvalidRequestError, match=r"too many messages of unusual roles.*at most 32 whose"
    )
    for count, outcome in ((32, contextlib.nullcontext()), (200, refusal)):
        rendered = 0
        seen = read_input(ChatPrompt((ChatMessage("critic", "no"),) * count))
        text = template.render(seen)
        with outcome:
            check_all_told(render, seen, text, ["critic"] * count)
        assert rendered == 32


def test_messages_that_a_template_writes_in_another_order_are_found():
    template = ChatTemplate(
        "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }};{% endfor %}", None, None
    )
    for count, outcome in ((1025, contextlib.nullcontext()), (1100, pytest.raises(InvalidRequestError))):
        messages = tuple(ChatMessage("critic", f"critique {index:06d}") for index in range(count))
        seen = read_input(ChatPrompt(messages))
        text = template.render(seen)
        with outcome:
            check_all_told(lambda _: pytest.fail("rendered again"), seen, text, ["critic"] * count)
