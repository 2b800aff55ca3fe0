from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest

from baton.proto.errors import CapacityError, InputError
from baton.text.guarded import GuardedRenderer
from baton.text.render_errors import RenderError, RenderLimit
from baton.text.sandbox import MAX_TEMPLATE_CHARS, render
from baton.text.tokenizer import ChatTemplate

from ..processes import wait_until

DOUBLING = """\
{% set n = namespace(s='x') %}
{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}
"""
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def guard():
    renderer = GuardedRenderer(timeout=20.0, cpu_seconds=1, memory_bytes=256 << 20)
    yield renderer
    renderer.close()


def chat(source: str, **options: object) -> str:
    return ChatTemplate({"default": source}, {"eos_token": "</s>"}).render(HELLO, **options)


def test_demo_template(demo):
    messages = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}],
        },
        {"role": "assistant", "content": "4"},
        *HELLO,
    ]
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    )
    assert demo.render_chat(messages, add_generation_prompt=False) == text
    assert demo.render_chat(messages) == text + "<|im_start|>assistant\n"
    ids = demo.encode_chat(messages)
    assert ids[0] == 1
    assert demo.decode(ids, skip_special_tokens=False) == text + "<|im_start|>assistant\n"


def test_demo_template_refuses_images(demo):
    with pytest.raises(InputError, match="reads text only, not image"):
        demo.render_chat([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n{% endif %}\n{% endfor %}",
            "Hello\n",
        ),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hello"}'),
        ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}x{{ eos_token }}{% endgeneration %}", "x</s>"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}{{ dict(a=1).a }}", "21"),
        ("{{ tools is none }} {{ bos_token is defined }} {{ mood }}", "True False good"),
        ("{{ strftime_now('%Y') }}", time.strftime("%Y")),
    ],
)
def test_what_templates_can_use(guard, source, expected):
    assert chat(source, mood="good") == expected
    variables = {"messages": HELLO, "tools": None, "eos_token": "</s>", "mood": "good"}
    assert guard.render(source, variables) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.update(messages[0], {'role': 'x'}) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception('no') }}",
        "{{ undefined_name + 1 }}",
        "{{ 1 / 0 }}",
        "{% for %}",
        "{% include 'other' %}",
        "{{ range(10 ** 9) | list }}",
        "(" * 10 + "{{ " + "(" * 5000 + "}}",
    ],
)
def test_bad_templates_are_typed_errors(guard, source):
    with pytest.raises(InputError, match="chat template: "):
        chat(source)
    with pytest.raises(RenderError):
        guard.render(source, {"messages": HELLO})


def test_tool_template_is_chosen_for_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"})
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"name": "search"}]) == "search"
    assert ChatTemplate({"only": "one"}).render(HELLO) == "one"


def test_missing_template_says_what_to_do():
    with pytest.raises(
        InputError, match=r"^the model has no chat template; give the prompt as text"
    ):
        ChatTemplate({}).render(HELLO)
    with pytest.raises(InputError, match="only a, b"):
        ChatTemplate({"a": "", "b": ""}).render(HELLO)


@pytest.mark.parametrize("messages", [[], "Hello", [{}], [{"role": 1}], ["x"], None, HELLO * 5000])
def test_messages_of_the_wrong_shape(messages):
    with pytest.raises(InputError):
        ChatTemplate({"default": "x"}).render(messages)


def test_messages_for_the_guard_must_be_json(guard):
    with pytest.raises(InputError, match="plain JSON"):
        ChatTemplate({"default": "x"}, guard=guard).render([{"role": "user", "content": b"raw"}])


def test_sizes_are_capped(guard):
    for renderer in (render, guard.render):
        with pytest.raises(RenderLimit, match="exceeds 99 characters"):
            renderer("{% for i in range(99999) %}xxxxx{% endfor %}", {}, 99)
        with pytest.raises(RenderLimit, match="template has more"):
            renderer("x" * (MAX_TEMPLATE_CHARS + 1), {})


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'x' * 10 ** 10 }}", "needs too much memory"),
        ("{{ '%0900000000d' | format(1) }}", "needs too much memory"),
        (DOUBLING, "needs too much memory"),
        ("{{ 10 ** (10 ** 9) }}", "used too much processor time"),
    ],
)
def test_bombs_end_within_the_limits_and_the_next_render_works(guard, source, reason):
    with pytest.raises(RenderLimit, match=reason):
        guard.render(source, {})
    assert guard.render("{{ a }}", {"a": "fine"}) == "fine"


def test_wall_time_is_limited():
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    renderer = GuardedRenderer(timeout=0.5)
    with pytest.raises(RenderLimit, match="took longer"):
        renderer.render(source, {})
    renderer.close()


def test_the_start_of_the_process_is_not_part_of_the_time_limit(monkeypatch, tmp_path):
    """Reading the libraries from a slow disk can take longer than a template may."""
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    renderer = GuardedRenderer(timeout=2.5)
    assert renderer.render("{{ a }}", {"a": "fine"}) == "fine"
    renderer.close()


def test_closing_waits_for_no_start(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    renderer, errors = GuardedRenderer(), []

    def render() -> None:
        with pytest.raises(CapacityError, match="a helper process cannot start") as caught:
            renderer.render("{{ a }}", {"a": "fine"})
        errors.append(caught.value)

    rendering = threading.Thread(target=render)
    rendering.start()
    wait_until(lambda: renderer._helper, what="the helper")
    pid = renderer._helper.pid
    renderer.close()
    rendering.join(20)
    assert len(errors) == 1
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_cannot_run_is_named():
    renderer = GuardedRenderer(memory_bytes=1 << 20)
    with pytest.raises(RenderLimit, match="failed with exit code"):
        renderer.render("x" * 100_000, {})
    renderer.close()


def test_a_large_conversation_passes_both_ways(guard):
    text = "é" * (1 << 20)
    assert guard.render("{{ messages[0].content }}", {"messages": [{"content": text}]}) == text


def test_the_process_is_reused_and_ends_with_its_owner():
    renderer = GuardedRenderer()
    renderer.render("x", {})
    pid = renderer._helper.pid
    renderer.render("y", {})
    assert renderer._helper.pid == pid
    assert Path(f"/proc/{pid}").exists()
    del renderer
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_process_is_replaced(guard):
    guard.render("x", {})
    guard._helper.kill()
    assert guard.render("y", {}) == "y"
