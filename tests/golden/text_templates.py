"""Chats for make_text.py: templates in the style of well-known families, and messages for them.

Each template uses what its family's templates are known to use: default system prompts, BOS,
role checks that raise, trimming, tools as JSON, namespaces, macros, loop controls, contents that
are lists of parts, and the markers of training data.
"""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "1 Jan 2025" %}
{%- endif %}
{#- The system message comes first, trimmed. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Answer with a call of one of these functions.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Functions\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and
           not(message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set thoughts = '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thoughts.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<result>\\n' + message.content + '\\n</result>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

TURNS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

INST = """\
{%- macro wrap(text) -%}
    [INST] {{ text }} [/INST]
{%- endmacro -%}
{{ bos_token }}{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% if message.role == 'user' %}
        {{ wrap(message.content) }}
    {% else %}
        {% generation %}
        {{ ' ' ~ message.content|upper|replace('A', 'a') ~ eos_token }}
        {% endgeneration %}
    {% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ [3, 1, 2]|sort|join('-') }} {{ messages|map(attribute='role')|unique|list|tojson }}
{{ {'b': 1, 'a': '<é&>'}|tojson(sort_keys=true) }} {{ messages|selectattr('role', 'equalto',
'user')|list|length }} {{ "%s:%03d" % ('x', 7) }} {{ '{:>5}'.format('y') }}{{ unset }}
{% for key, value in {'k': 1, 'l': none}.items() %}
{{ key }}={{ value }} {% endfor %}
"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city — today's <b>temperature</b>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Zürich", "Łódź"]}},
            "required": ["city"],
        },
    },
}
SIMPLE = [{"role": "user", "content": "Hi there"}]
LONG = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "Grüße & <tags> 😀 "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!\n"},
    {"role": "user", "content": "  And\n\nthen?  "},
]
CALLS = [
    {"role": "user", "content": "Weather in Łódź?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Łódź"}}}
        ],
    },
    {"role": "tool", "content": '{"t": 21}'},
]
PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
    {
        "role": "user",
        "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}],
    },
]
LLAMA_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
GEMMA_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


def _chat(template: str, messages: list, **more: object) -> dict:
    return {"template": template, "messages": messages, **more}


CHATS = [
    _chat(CHATML, SIMPLE),
    _chat(CHATML, LONG),
    _chat(CHATML, LONG, add_generation_prompt=False),
    _chat(HEADERS, SIMPLE, special_tokens=LLAMA_TOKENS),
    _chat(HEADERS, LONG, special_tokens=LLAMA_TOKENS, variables={"date_string": "26 Jul 2024"}),
    _chat(HEADERS, CALLS, special_tokens=LLAMA_TOKENS, tools=[WEATHER, WEATHER]),
    _chat(TOOLS, SIMPLE),
    _chat(TOOLS, LONG, variables={"enable_thinking": False}),
    _chat(TOOLS, [*LONG[:1], *CALLS, *CALLS[2:]], tools=[WEATHER]),
    _chat(TOOLS, LONG[:3], add_generation_prompt=False),
    _chat(TURNS, SIMPLE, special_tokens=GEMMA_TOKENS),
    _chat(TURNS, LONG, special_tokens=GEMMA_TOKENS),
    _chat(TURNS, PARTS, special_tokens=GEMMA_TOKENS),
    _chat(INST, LONG, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}),
]
