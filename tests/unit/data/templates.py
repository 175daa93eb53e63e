"""Chat templates written for tests in the manner of published ones: their special tokens, and what a reply looks like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """reply: how a reply stands in the text, its end-of-turn included. special: tokens. eos: of the tokenizer.

    system: whether system turns are taken. trims: replies lose their outer blanks. thinks: thoughts are rendered, of the last
    reply.
    """

    template: str
    reply: str
    special: tuple[str, ...]
    eos: str
    system: bool = True
    trims: bool = False
    thinks: bool = False


CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA3_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>")

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set turns = messages %}{% set system = '' %}{% endif %}{% for message in turns %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user and assistant') }}
{%- endif %}{% set content = message['content'] %}{% if loop.index0 == 0 and system %}
{%- set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + content %}{% endif %}{% if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

LLAMA3 = """{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
}} {{- message['content'] | trim + '<|eot_id|>' }}{% endfor %} {%- if add_generation_prompt %}{{
'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

LLAMA31 = """{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}
{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}{{- system }}{{-
"<|eot_id|>" }} {%- for message in messages %}{%- if message.role == 'ipython' or message.role == 'tool' %} {{-
"<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }} {%- elif 'tool_calls' in message %}{{-
'<|start_header_id|>assistant<|end_header_id|>\\n\\n' }} {%- set call = message.tool_calls[0].function %} {{- '{"name": "' +
call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }} {%- else %}{{- '<|start_header_id|>' +
message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }} {%- endif %}{%- endfor %} {%- if
add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

QWEN2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN3 = """{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content +
'\\n\\n' }} {%- endif %}{{- "# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %} {{-
"\\n</tools><|im_end|>\\n" }}{%- elif messages[0].role == 'system' %} {{- '<|im_start|>system\\n' + messages[0].content +
'<|im_end|>\\n' }}{%- endif %} {%- set ns = namespace(last=messages|length - 1, seeking=true) %}{%- for message in
messages[::-1] %} {%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.seeking and message.role == "user" %}{%- set
ns.seeking = false %} {%- set ns.last = index %}{%- endif %}{%- endfor %}{%- for message in messages %}{%- set content =
message.content %} {%- if message.role == "user" or (message.role == "system" and not loop.first) %} {{- '<|im_start|>' +
message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- elif message.role == "assistant" %} {%- set reasoning = '' %}{%- if
message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %} {%- elif '</think>' in content %} {%-
set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %} {%- set content =
content.split('</think>')[-1].lstrip('\\n') %}{%- endif %} {%- if loop.index0 > ns.last and (loop.last or reasoning) %} {{-
'<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }} {%- else %}{{-
'<|im_start|>assistant\\n' + content }}{%- endif %}{%- if message.tool_calls %} {%- for tool_call in message.tool_calls %}{%-
if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %} {{- '<tool_call>\\n{"name": "' + tool_call.name +
'", "arguments": ' + (tool_call.arguments | tojson) + '}\\n</tool_call>' }} {%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%-
elif message.role == "tool" %} {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}{%-
endif %}{%- endfor %} {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }} {%- if enable_thinking is defined and
enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('After the optional system message, roles must alternate user/assistant') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"""

MISTRAL_V3 = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}{%- set turns = messages[1:]
%} {%- else %}{%- set turns = messages %}{%- endif %}{{- bos_token }}{%- for message in turns %}{%- if message["role"] ==
"user" %} {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }} {%-
else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %} {%- else %}{{- " " + message["content"]|trim + eos_token
}}{%- endif %}{%- endfor %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}
{%- else %}{% set role = message['role'] %}{% endif %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\\n' + message['content'] +
'<|end|>\\n'}} {%- elif message['role'] == 'user' %}{{'<|user|>\\n' + message['content'] + '<|end|>\\n'}} {%- elif
message['role'] == 'assistant' %}{{'<|assistant|>\\n' + message['content'] + '<|end|>\\n'}}{% endif %}{% endfor %} {%- if
add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{- 'User: ' + message['content'] + '\\n\\n' }}{% elif message['role'] == 'assistant' %}
{{- 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

DEEPSEEK_V3 = """{% set ns = namespace(system='') %}{% for message in messages %}{% if message['role'] == 'system' %}
{%- set ns.system = ns.system + message['content'] %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}
{%- elif message['role'] == 'assistant' %}{% set content = message['content'] %}{% if '</think>' in content and not loop.last %}
{%- set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

ZEPHYR = """{% for message in messages %}{% if message['role'] == 'user' %}
{{- '<|user|>\\n' + message['content'] + eos_token + '\\n' }}{% elif message['role'] == 'system' %}
{{- '<|system|>\\n' + message['content'] + eos_token + '\\n' }}{% elif message['role'] == 'assistant' %}
{{- '<|assistant|>\\n' + message['content'] + eos_token + '\\n' }}{% endif %}
{%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""

GRANITE = """{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = "Knowledge Cutoff Date: April 2024.\\nToday's Date: " + strftime_now('%B %d, %Y') + "." %}
{%- set turns = messages %}{%- endif %}{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- for message in turns %}
{{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}{%- endfor %}"""

COMMAND_R = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + message['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message['role'] == 'user' %}
{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + message['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- elif message['role'] == 'assistant' %}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + message['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

SMOLLM_MARKED = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

VICUNA = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}
{%- elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}
{%- else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
PHI_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
COMMAND_TOKENS = ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>")
DEEPSEEK_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
GRANITE_TOKENS = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")

STYLES = {
    "chatml": Style(CHATML, "{}<|im_end|>", CHATML_TOKENS, "<|im_end|>"),
    "llama2": Style(LLAMA2, " {} </s>", ("<s>", "</s>"), "</s>", trims=True),
    "llama3": Style(LLAMA3, "{}<|eot_id|>", LLAMA3_TOKENS, "<|eot_id|>", trims=True),
    "llama3.1": Style(LLAMA31, "{}<|eot_id|>", LLAMA3_TOKENS, "<|end_of_text|>", trims=True),
    "qwen2": Style(QWEN2, "{}<|im_end|>", CHATML_TOKENS, "<|im_end|>"),
    "qwen3": Style(QWEN3, "{}<|im_end|>", CHATML_TOKENS, "<|im_end|>", thinks=True),
    "mistral": Style(MISTRAL, "{}</s>", ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", system=False),
    "mistral-v3": Style(MISTRAL_V3, " {}</s>", ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", system=False, trims=True),
    "gemma": Style(GEMMA, "{}<end_of_turn>", GEMMA_TOKENS, "<eos>", system=False, trims=True),
    "phi3": Style(PHI3, "{}<|end|>", PHI_TOKENS, "<|endoftext|>"),
    "deepseek": Style(DEEPSEEK, " {}<｜end▁of▁sentence｜>", DEEPSEEK_TOKENS[:2], "<｜end▁of▁sentence｜>"),
    "deepseek-v3": Style(DEEPSEEK_V3, "{}<｜end▁of▁sentence｜>", DEEPSEEK_TOKENS, "<｜end▁of▁sentence｜>"),
    "zephyr": Style(ZEPHYR, "{}</s>", ("<s>", "</s>"), "</s>"),
    "granite": Style(GRANITE, "{}<|end_of_text|>", GRANITE_TOKENS, "<|end_of_text|>"),
    "command-r": Style(
        COMMAND_R, "{}<|END_OF_TURN_TOKEN|>", (*COMMAND_TOKENS, "<|CHATBOT_TOKEN|>"), COMMAND_TOKENS[2], trims=True
    ),
    "smollm-marked": Style(SMOLLM_MARKED, "{}<|im_end|>", CHATML_TOKENS, "<|im_end|>"),
    "vicuna": Style(VICUNA, " {}</s>", ("<s>", "</s>"), "</s>"),
}


def _calling(calls: str, end: str = "<|im_end|>\\n", content: str = "message.content") -> str:
    """A template of turns in ChatML whose calls are written so."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.tool_calls %}{{ "
        + content
        + " }}"
        "{% for tool_call in message.tool_calls %}{% set function = tool_call.function %}" + calls + "{% endfor %}"
        "{% else %}{{ message.content }}{% endif %}{{ '" + end + "' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )


_JSON = '"name": "\' + function.name + \'", "arguments": \' + (function.arguments | tojson) + \''
_VALUE = "{{ value | tojson if value is not string else value }}"
_ITEMS = "{% for key, value in function.arguments | items %}"
TOOL_STYLES = {  # what calls look like in published templates
    "hermes": _calling("{{ '\\n<tool_call>\\n{" + _JSON + "}\\n</tool_call>' }}"),
    "llama": _calling(
        "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
        "{{ '{\"name\": \"' + function.name + '\", \"parameters\": ' + (function.arguments | tojson) + '}' }}",
        content="''",
    ),
    "mistral": _calling(
        "{{ ('[TOOL_CALLS][' if loop.first else ', ') + '{" + _JSON + ', "id": "\' + tool_call.id + \'"}\' }}'
        "{% if loop.last %}{{ ']' }}{% endif %}"
    ),
    "mistral-args": _calling("{{ '[TOOL_CALLS]' + function.name + '[ARGS]' + (function.arguments | tojson) }}"),
    "deepseek": _calling(
        "{{ ('<｜tool▁calls▁begin｜>' if loop.first else '\\n') + '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' }}"
        "{{ function.name + '\\n```json\\n' + (function.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}"
        "{% if loop.last %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}"
    ),
    "quoted": _calling(
        '{{ \'<call>{"name": "\' + function.name + \'", "arguments": \' }}'
        "{{ function.arguments | tojson | tojson }}{{ '}</call>' }}"
    ),
    "qwen-xml": _calling(
        "{{ '\\n<tool_call>\\n<function=' + function.name + '>\\n' }}" + _ITEMS + "{{ '<parameter=' + key + '>\\n' }}"
        "{{ value | string }}{{ '\\n</parameter>\\n' }}{% endfor %}{{ '</function>\\n</tool_call>' }}"
    ),
    "glm": _calling(
        "{{ '\\n<tool_call>' + function.name }}"
        + _ITEMS
        + "{{ '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}"
        + _VALUE
        + "{{ '</arg_value>' }}{% endfor %}{{ '\\n</tool_call>' }}"
    ),
}
# a call is a message of its own after the text, and its header names the function, which targets write in another order
RECIPIENT = """{% for message in messages %}{% set header = '<|im_start|>' + message.role %}{% if message.content %}
{{- header + '\\n' + message.content + '<|im_end|>' }}{% endif %}{% for tool_call in message.tool_calls or [] %}
{{- header + ' to=' + tool_call.function.name + '\\n' + (tool_call.function.arguments | tojson) + '<|im_end|>' }}{% endfor %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""
