"""Chat templates render as transformers renders them, and cannot do harm."""

import datetime as dt
from typing import Any

import pytest

from noria.errors import RejectedError, TokenizerError
from noria.text import Tokenizer
from noria.text.chat_template import ChatTemplate

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello, <b>you</b> & 'me' — 漢字"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
]
FUNCTION = {"name": "f", "description": 'a "b" <c>', "parameters": {"é": [1, None, True]}}
TOOLS = [{"type": "function", "function": FUNCTION}]

TEMPLATES = {
    "chatml": """
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama 2": """
{%- if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}
{%- else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}
{%- for m in loop_messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- set content = system + m['content'] if loop.index0 == 0 else m['content'] %}
{%- if m['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "whitespace, namespaces and loop controls": """
        {%- set ns = namespace(found=false, count=0) -%}
        {%- for m in messages %}
            {%- if m.role == 'system' %}{% continue %}{% endif %}
            {%- set ns.count = ns.count + 1 %}
            {%- if ns.count > 2 %}{% break %}{% endif %}
            {{ loop.index }}/{{ loop.length }}:{{ m.content }}{% if not loop.last %},{% endif %}

        {% endfor %}
        {%- for k, v in {'a': 1, 'b': [2, 3]}.items() %}{{ k }}={{ v | tojson }};{% endfor %}
        {%- for m in messages if m.role == 'user' %}{{ loop.revindex }}{{ loop.previtem }}{% endfor %}
        {{ ns.count }}{{ bos_token }}{{ missing }}""",
    "tools": """
{%- if tools is not none %}{{ tools | tojson(indent=4) }}{% for t in tools %}{{ t | tojson }}
{{ t.function | tojson(ensure_ascii=True) }}{% endfor %}{% endif %}{{ documents }}{{ enable_thinking }}""",
    "generation blocks": """
{%- for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{% set x = 1 %}{{ m.content }}{% endgeneration %}
{% else %}{{ m.content }}{{ x }}{% endif %}{% endfor %}""",
    "macros, filters and recursion": """
{%- macro show(n) %}{% if n %}{{ n }}{{ show(n - 1) }}{% endif %}{% endmacro %}
{{ show(3) }}{{ messages | map(attribute='role') | join('|') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{% for x in [[1, [2]], 3] recursive %}
{%- if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}{% endfor %}
{{ 'ab' * 3 }}{{ 2 ** 3 }}{{ messages[-1]['content'][::-1] }}{{ range(3) | list }}{{ dict(a=1) }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_template_renders_as_transformers_renders_it(name: str, add_generation_prompt: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(TEMPLATES[name], special).render(
        CHAT, add_generation_prompt=add_generation_prompt, tools=TOOLS, variables={"enable_thinking": False}
    )
    theirs, _ = utils.render_jinja_template(
        conversations=[CHAT],
        tools=TOOLS,
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        enable_thinking=False,
        **special,
    )
    assert ours == theirs[0]
    assert len(ours) > 20


def test_the_template_of_a_gguf_file_is_its_own(smollm2: Tokenizer) -> None:
    prompt = smollm2.apply_chat_template([{"role": "user", "content": "What is 2+2?"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.encode(prompt, add_special_tokens=False)
    assert ids[0] == 1
    assert ids.count(2) == 2
    closed = smollm2.apply_chat_template([{"role": "system", "content": "x"}], add_generation_prompt=False)
    assert closed == "<|im_start|>system\nx<|im_end|>\n"


def test_a_template_may_ask_for_the_date() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(CHAT)
    assert abs(int(rendered) - dt.datetime.now().year) <= 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate$"),
        ("{{ messages[0]['content'] + 1 }}", "refuses these messages: can only concatenate str"),
        ("{{ messages[9].role }}", "refuses these messages: .* has no element 9"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "calls itself too deeply"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' .* is unsafe"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "stores the name '__init__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ 'x' * 10000000000 }}", "it makes 1 × 10000000000 items; 1000000 are the limit"),
        ("{{ 9 ** 99999999 }}", "raises a number to the power 99999999; 64 is the limit"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "more than 2000000 loop",
        ),
        (
            "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% for c in r %}"
            "{% endfor %}{% endfor %}{% endfor %}",
            "more than 2000000 loop passes and calls",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "more than 2000000",
        ),
        ("{% for x in none %}{% endfor %}", "refuses these messages: 'NoneType' object is not iterable"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_told_in_one_sentence(source: str, expected: str) -> None:
    with pytest.raises(RejectedError, match=expected) as raised:
        ChatTemplate(source, {}).render(CHAT)
    assert "\n" not in str(raised.value)


def test_a_rendering_leaves_the_messages_and_the_next_rendering_alone() -> None:
    template = ChatTemplate("{% for m in messages %}{% for i in range(1400) %}{% endfor %}{% endfor %}ok", {})
    chat = [dict(message) for message in CHAT]
    for _ in range(400):  # together more than one rendering's budget
        assert template.render(chat) == "ok"
    assert chat == CHAT


def test_a_template_that_is_not_valid_names_its_line() -> None:
    with pytest.raises(
        TokenizerError, match=r"the chat template is not valid: .*unknown tag 'nope'.* \(line 2\)"
    ):
        ChatTemplate("a\n{% nope %}", {})


@pytest.mark.parametrize("bad", ["hello", {"content": "x"}, {"role": 3, "content": "x"}, None])
def test_a_message_that_is_none_is_named_by_its_place(bad: Any) -> None:
    with pytest.raises(RejectedError, match="message 1 must be a mapping with a 'role'; got"):
        ChatTemplate("x", {}).render([CHAT[0], bad])


@pytest.mark.parametrize("bad", [{"role": "user"}, {"role": "user", "content": None}])
def test_a_message_that_says_nothing_is_named_by_its_place(bad: Any) -> None:
    with pytest.raises(RejectedError, match="message 1 has no content"):
        ChatTemplate(PLAIN, {}).render([{"role": "user", "content": ""}, bad])


PLAIN = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
READS_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}<{{ part.type }}:{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
SETS_PARTS = (
    "{% for m in messages %}{% set content = m['content'] %}"
    "{% for part in content %}<{{ part['text'] }}>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [(PLAIN, "[user] one\ntwo\n"), (READS_PARTS, "<text:one><text:two>"), (SETS_PARTS, "<one><two>")],
)
def test_text_parts_go_to_templates_as_they_read_them(source: str, expected: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert ChatTemplate(source, {}).render([{"role": "user", "content": parts}]) == expected
    assert parts[1]["type"] == "input_text"


def test_smollm2_takes_parts_and_tools_and_a_system_message(smollm2: Tokenizer) -> None:
    whole = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a\nb"}]
    parts = [whole[0], {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    expected = smollm2.apply_chat_template(whole)
    assert smollm2.apply_chat_template(parts, tools=[{"type": "function"}]) == expected
    assert "Be brief." in expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (5, "the content of message 0 must be a text or a list of parts; got int"),
        ([{"type": "image_url"}], "part 0 of message 0 is of type 'image_url'; only text is read"),
        (["a", {"type": "text"}], "part 1 of message 0 has no text"),
        ([7], "part 0 of message 0 must be a text or a mapping; got int"),
    ],
)
def test_content_that_is_not_text_is_named(content: Any, expected: str) -> None:
    with pytest.raises(RejectedError, match=expected):
        ChatTemplate(PLAIN, {}).render([{"role": "user", "content": content}])
