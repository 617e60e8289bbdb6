"""Chat templates with the markup and the habits of well-known ones, for tests. Each is written anew and short."""

from __future__ import annotations

_TOOLS = "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
_ANSWERS = (
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_SYSTEM = "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + _TOOLS
_OTHERS = (
    "{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
)

QWEN_2_5 = _SYSTEM + "<|im_end|>\n{% for m in messages %}" + _ANSWERS + _OTHERS + "{% endfor %}" + _BEGIN
"""Everything stays as it was said; answers of tools in a row share one user turn."""

QWEN_3 = (
    _SYSTEM
    + "<|im_end|>\n{% set ns = namespace(last=-1) %}"
    + "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}"
    + _ANSWERS
    + "{% elif m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    + "<|im_start|>assistant\n"
    + "{% if '</think>' in m.content and loop.index0 > ns.last %}"
    + "<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}"
    + "{{ said }}<|im_end|>\n"
    + _OTHERS
    + "{% endfor %}"
    + _BEGIN
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    + "<think>\n\n</think>\n\n{% endif %}"
)
"""Drops what was thought before the last question, and the empty thought of a model that shall not think."""

LLAMA_3 = (
    "{% set ns = namespace(tools=tools) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.role == 'user' and ns.tools %}{% for t in ns.tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}"
    "{% set ns.tools = none %}{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
"""Trims what was said; shows the tools in the first question."""

MISTRAL = (
    "<s>{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% set ns = namespace(i=0) %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' }}{{ c.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + c.id + '\"}' }}{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('whose call?') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}'
    "{% endfor %}"
)
"""Wants roles to alternate, calls before their answers, with ids; shows the tools before the last question."""

BUNDLED = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""That of the model that ships with the package."""

TEMPLATES = {
    "qwen2.5": (QWEN_2_5, "<|im_end|>"),
    "qwen3": (QWEN_3, "<|im_end|>"),
    "llama3": (LLAMA_3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "bundled": (BUNDLED, "<|end|>"),
}
"""With the text of the token that ends an answer."""
