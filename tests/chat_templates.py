"""Chat templates in the formats that models publish, and conversations to render with them."""

from __future__ import annotations

from llorch_serve.requests import ChatMessage

# SmolLM2-135M-Instruct, from the metadata of its GGUF file.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
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


CONVERSATIONS = {
    "question": conversation("What is the capital of France?"),
    "system": conversation("  hello world \n", system="the <b>system</b> & 'quotes' \" end"),
    "turns": conversation("hello", " the end ", "你好 😀\n\nworld", system="hello"),
    "empty": conversation(""),
    "code": conversation("{{ 7 * 7 }} {% if %} \\n {# no #}"),
}
