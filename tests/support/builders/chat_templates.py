"""Chat templates in the formats that models publish, and conversations to render with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llorch_serve.chat.template import ChatTemplate, encode_chat
from llorch_serve.chat.template_input import read_input
from llorch_serve.requests import ChatMessage, ChatPrompt, ToolCall
from llorch_serve.text.tokenizer import Tokenizer

# SmolLM2-135M-Instruct, from the metadata of its GGUF file.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# [INST] and <<SYS>>, roles in turn, BOS before each question and EOS after each answer.
LLAMA2 = """{% if messages[0]['role'] == 'system' %}
{% set system = '<<SYS>>\\n' ~ messages[0]['content'] ~ '\\n<</SYS>>\\n\\n' %}
{% set turns = messages[1:] %}
{% else %}
{% set system = '' %}
{% set turns = messages %}
{% endif %}
{% for turn in turns %}
{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if turn['role'] == 'user' %}
{{- bos_token + '[INST] ' + (system if loop.first else '') + turn['content'].strip() + ' [/INST]' -}}
{% else %}
{{- ' ' + turn['content'] | trim + ' ' + eos_token -}}
{% endif %}
{% endfor %}
"""

# Headers and end-of-turn tokens, a date in the system message, tools only where given.
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}
    {%- set ns.system = message.content | trim %}
{%- endfor %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' ~ date_string ~ '\\n' ~ ns.system ~ '<|eot_id|>' }}
{%- if tools is not none %}
    {{- tools | tojson(indent=4) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Whatever a template may see, as JSON.
JSON = "{{ messages | tojson }}{% for m in messages %}{{ '\\n' }}{{ m.content is defined }}{% endfor %}"

TEMPLATES = {"smollm2": SMOLLM2, "llama2": LLAMA2, "llama3": LLAMA3, "json": JSON}


def conversation(*turns: str, system: str | None = None) -> list[ChatMessage]:
    """Return questions and answers in turn, after a system message if there is one."""
    first = [] if system is None else [ChatMessage("system", system)]
    return first + [ChatMessage(("user", "assistant")[i % 2], text) for i, text in enumerate(turns)]


def rendered(template: ChatTemplate, messages: Sequence[ChatMessage], **fields: Any) -> str:
    """Return a conversation as text; fields are those of a ChatPrompt."""
    return template.render(read_input(ChatPrompt(tuple(messages), **fields)))


def encoded(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[ChatMessage], **fields: Any
) -> tuple[tuple[int, ...], str]:
    """Return a conversation's ids and its text."""
    prompt = ChatPrompt(tuple(messages), **fields)
    return encode_chat(tokenizer, template, prompt, most=2**17, most_chars=2**20)


CONVERSATIONS = {
    "question": conversation("What is the capital of France?"),
    "system": conversation("  hello world \n", system="the <b>system</b> & 'quotes' \" end"),
    "turns": conversation("hello", " the end ", "你好 😀\n\nworld", system="hello"),
    "empty": conversation(""),
    "code": conversation("{{ 7 * 7 }} {% if %} \\n {# no #}"),
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The <weather> in a city & its 'surroundings'",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "days": {"type": "integer", "description": "How many days", "enum": [1, 2, 3]},
                "units": {"type": "array", "description": "Which units", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time 🕐",
        "parameters": {"type": "object", "properties": {}},
    },
}
TOOLS = (json.dumps(WEATHER), json.dumps(CLOCK))
DOCUMENTS = tuple(
    json.dumps(
        {"title": title, "text": text, "doc_id": str(index), "snippet": text, "url": "https://example.org"}
    )
    for index, (title, text) in enumerate(
        [("Paris", "The capital & <heart> of France."), ("月", "Ça brille.")]
    )
)


def _call(city: str, number: int) -> ToolCall:
    return ToolCall(
        "get_weather", json.dumps({"city": city, "days": number}, ensure_ascii=False), f"call{number:05}"
    )


TOOL_CONVERSATIONS = {
    "one call": [
        ChatMessage("user", "Weather in Köln?"),
        ChatMessage("assistant", None, tool_calls=(_call("Köln", 1),)),
        ChatMessage("tool", '{"celsius": 12.5}', name="get_weather", tool_call_id="call00001"),
    ],
    "a call beside empty content": [
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Weather in Köln?"),
        ChatMessage("assistant", "", tool_calls=(_call("Köln", 1),)),
        ChatMessage("tool", "rain", name="get_weather", tool_call_id="call00001"),
        ChatMessage("assistant", "It rains."),
        ChatMessage("user", "Thanks"),
    ],
    "two calls": [
        ChatMessage("user", "Weather in Köln and Paris?"),
        ChatMessage("assistant", "Let me see.", tool_calls=(_call("Köln", 1), _call("Paris", 2))),
        ChatMessage("tool", "rain", tool_call_id="call00001"),
        ChatMessage("tool", "<sun>", tool_call_id="call00002"),
    ],
    "null content": [
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", None),
        ChatMessage("user", "There?"),
    ],
    "null question": [ChatMessage("user", None)],
    "parts": [ChatMessage("user", ("Look", "at this")), ChatMessage("assistant", ("Yes.",))],
    "reasoning": [
        ChatMessage("user", "Why?"),
        ChatMessage("assistant", "Because.", reasoning_content="Hmm.\nWell."),
        ChatMessage("user", "Really?"),
    ],
    "reasoning in the text": [
        ChatMessage("user", "Why?"),
        ChatMessage("assistant", "<think>\nHmm.\n</think>\n\nBecause."),
    ],
    "unfinished": [ChatMessage("user", "Count"), ChatMessage("assistant", "one, two, ")],
    "assistant first": [ChatMessage("assistant", "Hello"), ChatMessage("user", "Hi")],
    "an unknown role": [ChatMessage("narrator", "Once upon a time"), ChatMessage("user", "Go on")],
}
