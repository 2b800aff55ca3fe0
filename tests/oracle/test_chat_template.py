"""Chat prompts have the token ids transformers gives, for templates in the usual styles."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton.text.tokenizer import Tokenizer

pytestmark = pytest.mark.oracle
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; run make test-oracle"
)

DEMO_FOLDER = Path(__file__).parents[2] / "deploy" / "demo_model"

TEMPLATES = {
    "demo": (DEMO_FOLDER / "chat_template.jinja").read_text(),
    "default system message": """\
{%- if messages[0].role == 'system' %}
    {%- set loop_messages = messages[1:] %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {%- set loop_messages = messages %}
    {{- '<|im_start|>system\\nToday is ' + strftime_now('%d %B %Y') + '.<|im_end|>\\n' }}
{%- endif %}
{% for message in loop_messages %}
    {% if message.role == 'assistant' %}
    {% generation %}
{{ '<|im_start|>assistant\\n' + message.content | trim }}<|im_end|>
    {% endgeneration %}
    {% else %}
{{ '<|im_start|>' + message.role }}
{{ message.content | trim }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
""",
    "instructions in brackets": """\
{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{% set ns = namespace(system=message['content']) %}
{{ '<<' + ns.system + '>>' }}
{% elif message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}
{% endfor %}
""",
    "tools": """\
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.index0 == ns.last_user and tools is not none %}
        {{- '<tools>' }}
        {%- for tool in tools %}{{ tool | tojson }}{{ ', ' if not loop.last }}{% endfor %}
        {{- '</tools>' }}
        {{- tools[0] | tojson(indent=2) }}
    {%- endif %}
    {%- if message.role == 'ignored' %}{% continue %}{% endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
""",
}
CONVERSATIONS = {
    "one question": [{"role": "user", "content": "Tell me a story about a fox."}],
    "several turns": [
        {"role": "system", "content": "Be brief, été 😀 <|im_end|>."},
        {"role": "user", "content": "  What is 2 + 2?\n"},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "And < 3 & 'more'?"},
    ],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a <city>, à la carte.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
OPTIONS = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False, "enable_thinking": False},
    {"add_generation_prompt": True, "tools": [TOOL]},
]


@pytest.fixture(params=sorted(TEMPLATES))
def folder(request, tmp_path):
    for path in DEMO_FOLDER.glob("*.json"):
        shutil.copy(path, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[request.param])
    return tmp_path


@pytest.mark.parametrize("conversation", sorted(CONVERSATIONS))
@pytest.mark.parametrize("options", OPTIONS)
def test_ids_equal_those_of_transformers(folder, conversation, options):
    messages = CONVERSATIONS[conversation]
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(messages, return_dict=False, **options)
    ours = Tokenizer.from_folder(folder)
    assert ours.encode_chat(messages, **options).tolist() == expected
    fetched = Tokenizer.from_files({path.name: path.read_bytes() for path in folder.iterdir()})
    assert fetched.encode_chat(messages, **options).tolist() == expected
    fetched.close()


@pytest.mark.parametrize("text", ["Hello!", "été 😀\n\n  x", "<|im_start|>user", "12345 + 6", ""])
def test_encode_and_decode_equal_those_of_transformers(text):
    reference = transformers.AutoTokenizer.from_pretrained(DEMO_FOLDER)
    ours = Tokenizer.from_folder(DEMO_FOLDER)
    ids = reference(text)["input_ids"]
    assert ours.encode(text).tolist() == ids
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert ours.bos_token_id == reference.bos_token_id
    assert ours.eos_token_id == reference.eos_token_id
