"""Chat templates: what they give, what they are refused, and that each fault is one line."""

from __future__ import annotations

import sys
from datetime import datetime
from types import MappingProxyType
from typing import Any

import pytest

from streaming.chat_template import choose_template, render_chat
from streaming.errors import OptionError, StreamingError
from streaming.template_sandbox import MAX_SIZE, MAX_STEPS
from streaming.tokenizer import Tokenizer

from .templates import CHATML, LLAMA3, MISTRAL

_MESSAGES = [{"role": "user", "content": "Hi <b>"}]


def _render(template: str, messages: list[dict[str, Any]] = _MESSAGES, **changes: Any) -> str:
    return render_chat(template, messages, **{"add_generation_prompt": False, **changes})


def test_chatml_with_and_without_the_opening_of_the_answer() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *_MESSAGES]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
    assert _render(CHATML, messages) == text
    assert _render(CHATML, messages, add_generation_prompt=True) == text + "<|im_start|>assistant\n"


def test_the_demo_models_own_template_adds_its_system_prompt(demo: Tokenizer) -> None:
    assert demo.chat_template is not None
    text = _render(demo.chat_template, add_generation_prompt=True, special_tokens=demo.special_tokens)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert demo.encode(text, add_special_tokens=False)[:3] == [1, 9690, 198]


def test_the_date_is_the_one_that_is_given() -> None:
    text = _render(LLAMA3, bos_token="<|begin_of_text|>", now=datetime(2026, 2, 3))
    assert text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 03 Feb 2026\n\n")


def test_a_template_can_refuse_the_conversation() -> None:
    with pytest.raises(StreamingError) as error:
        _render(MISTRAL, [{"role": "assistant", "content": "Hi"}], bos_token="<s>", eos_token="</s>")
    assert str(error.value) == (
        "the chat template refuses this conversation: roles must alternate: user/assistant/user/..."
    )


def test_special_tokens_and_variables_reach_the_template_and_missing_ones_are_undefined() -> None:
    template = "{{ bos_token }}{{ pad_token }}{{ mode }}{{ eos_token is defined }}"
    special = {"bos_token": "<x>", "pad_token": "<p>"}
    assert _render(template, bos_token="<s>", special_tokens=special, variables={"mode": 3}) == "<s><p>3False"


def test_json_is_not_escaped_for_html() -> None:
    assert _render("{{ messages|tojson }}") == '[{"role": "user", "content": "Hi <b>"}]'
    assert (
        _render("{{ 'é<'|tojson(ensure_ascii=true) }}{{ [1, 2]|tojson(separators=(',', ':')) }}") == '"\\u00e9<"[1,2]'
    )


def test_blocks_leave_no_blank_lines() -> None:
    assert _render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "tried what it must not: access to attribute '__class__' of 'str' object"),
        ("{{ cycler.__init__.__globals__ }}", "tried what it must not: access to attribute '__init__'"),
        ("{{ messages.append(1) }}", "tried what it must not: access to attribute 'append' of 'list' object"),
        ("{{ messages[0].update({'role': 'x'}) }}", "tried what it must not: access to attribute 'update'"),
        ("{% set ns = namespace(__class__=1) %}", "tried what it must not: the name '__class__' in a namespace"),
        ("{% set ns = namespace() %}{% set ns.__x = 1 %}", "tried what it must not: the name '__x' in a namespace"),
        ("{% if %}", "is broken in line 1: Expected an expression"),
        ("a\n{{ nothing.x }}", "failed: UndefinedError: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError: division by zero"),
        ("{{ 'a' + 1 }}", "failed: TypeError: can only concatenate str"),
        ("{% include 'other' %}", "failed: TypeError: no loader for this environment specified"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "was stopped: it nests or calls itself too deeply"),
        ("{{ raise_exception('no\n  way ' ~ 'x' * 400) }}", "refuses this conversation: no way xxx"),
    ],
)
def test_faults_and_tricks_end_in_one_line(template: str, words: str) -> None:
    with pytest.raises(StreamingError) as error:
        _render(template)
    assert str(error.value).startswith(f"the chat template {words}")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert _MESSAGES == [{"role": "user", "content": "Hi <b>"}]


_LONG = "{% set ns = namespace(s=START) %}{% for i in range(99) %}{% set ns.s = ns.s OP ns.s %}{% endfor %}"
_TOO_LARGE = f"was stopped: it made a text, a list or a width larger than {MAX_SIZE}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(10000000) %}x{% endfor %}", "failed: OverflowError: Range too big."),
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            f"was stopped: its loops made more than {MAX_STEPS} rounds",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            f"was stopped: its loops made more than {MAX_STEPS} rounds",
        ),
        (
            "{% for x in [range(9999)] * 9999 recursive %}{% if x is iterable %}{{ loop(x) }}{% endif %}{% endfor %}",
            f"was stopped: its loops made more than {MAX_STEPS} rounds",
        ),
        (_LONG.replace("START", "'a'").replace("OP", "~"), _TOO_LARGE),
        (_LONG.replace("START", "'a'").replace("OP", "+"), _TOO_LARGE),
        ("{{ 'a' * 10 ** 7 * 10 }}", _TOO_LARGE),
        ("{{ 10 * ([1] * 10 ** 7) }}", _TOO_LARGE),
        ("{{ 3 ** 999999999 }}", "was stopped: it computed a number of 1999999998 bits"),
        (
            "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
            "was stopped: it computed a number of 203 bits",
        ),
        ("{{ 'a'|center(999999999) }}", _TOO_LARGE),
        ("{{ 'a'|indent(width=999999999) }}", _TOO_LARGE),
        ("{{ 'a'.ljust(999999999) }}", _TOO_LARGE),
        (
            "{% set s = 'a' * 9999999 %}{{ s }}{{ s }}",
            f"was stopped: its text is longer than {MAX_SIZE} characters",
        ),
    ],
)
def test_what_would_never_end_or_fill_the_memory_is_stopped(template: str, words: str) -> None:
    with pytest.raises(StreamingError) as error:
        _render(template)
    assert str(error.value).startswith(f"the chat template {words}")


def test_large_numbers_and_long_texts_of_the_conversation_are_no_fault() -> None:
    show = "{% macro show(x) %}{{ x + 10 ** 10 }};{% endmacro %}"
    template = show + "{{ show(messages[0].id) }}{{ messages[0].content | length }}"
    messages = [{"role": "user", "content": "x" * 1_000_000, "id": 1_700_000_000}]
    assert _render(template, messages) == "11700000000;1000000"
    assert len(_render(CHATML, messages * 10)) > 10_000_000


def test_the_template_is_chosen_by_name_then_by_tools() -> None:
    templates = {"default": "D", "tool_use": "T", "rag": "R"}
    assert choose_template(templates) == "D"
    assert choose_template(templates, tools=True) == "T"
    assert choose_template({"default": "D"}, tools=True) == "D"
    assert choose_template(templates, name="rag", tools=True) == "R"
    with pytest.raises(OptionError, match="there is no chat template 'x'; the model has: default, rag, tool_use"):
        choose_template(templates, name="x")
    with pytest.raises(StreamingError, match=r"the model has no chat template .*use generate with a plain prompt"):
        choose_template({})


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "streaming.template_sandbox", raising=False)
    with pytest.raises(StreamingError, match=r"chat templates need the package jinja2, .*: pip install jinja2"):
        _render(CHATML)


_MEMORY = "the chat template was stopped: it took more memory than it may"
_DEEP = "the chat template was stopped: it nests or calls itself too deeply"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}", _MEMORY),
        ("{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}", _MEMORY),
        ("{{ ('b' * 10**6).join('a' * 10**6) }}", _MEMORY),
        ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", _DEEP),
        ("{% if 1 %}" * 400_000, _DEEP),
        ("{% if 1 %}" * 2000 + "{% endif %}" * 2000, _DEEP),
        pytest.param("{{ '%1000000000d' % 5 }}", "the chat template was stopped", marks=pytest.mark.slow),
        pytest.param("{{ '%*d' % (1000000000, 5) }}", "the chat template was stopped", marks=pytest.mark.slow),
    ],
)
def test_what_no_counting_would_notice_in_time_ends_with_its_process(template: str, words: str) -> None:
    with pytest.raises(StreamingError) as error:
        _render(template)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


def test_a_process_that_ends_without_a_word_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "streaming.template_process._PROGRAM", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    )
    with pytest.raises(StreamingError, match=r"more than 1024 MiB of memory or nests too deeply .*ended with -11"):
        _render(CHATML)


def test_what_is_no_json_is_told_and_other_mappings_are_taken() -> None:
    assert "Hi" in _render(CHATML, [MappingProxyType({"role": "user", "content": "Hi"})])  # type: ignore[list-item]
    with pytest.raises(StreamingError, match="cannot be given what is no JSON: an object of type object"):
        _render(CHATML, variables={"x": object()})
