"""A conversation as the text that a model was trained on: its chat template, rendered as Hugging Face does. [no-torch]

A template is a program that came with the weights. It runs in a process of its own, in a sandbox (no attributes of
Python's own, no changes to the messages) and with limits on its loops, calls, sizes, time and memory; what it does
wrong ends in one line of error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from typing import Any

from streaming.errors import OptionError, StreamingError
from streaming.template_process import render_apart
from streaming.tokenizer_config import DEFAULT_TEMPLATE

Message = Mapping[str, Any]


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    bos_token: str | None = None,
    eos_token: str | None = None,
    special_tokens: Mapping[str, str] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    now: datetime | None = None,
) -> str:
    """The text of the conversation; encode it with add_special_tokens=False, since it holds the special tokens.

    `messages`: {"role": "user", "content": TEXT} each, oldest first. `add_generation_prompt` ends it with the opening
    of the answer. `special_tokens` are texts by role (`Tokenizer.special_tokens`); `bos_token` and `eos_token`, where
    given, come before theirs. `variables` are handed to the template as they are: `enable_thinking` and its like.
    `now` is what the template's `strftime_now` tells (this moment when None). All of it is handed over as JSON.

    Raises StreamingError, in one line, when the template refuses the conversation, fails, or does what it must not.
    """
    given = {
        **(special_tokens or {}),
        **(variables or {}),
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "tools": tools,
        "documents": documents,
    }
    # Templates test `bos_token is defined`: a token that does not exist is left out, not None.
    given.update({k: v for k, v in (("bos_token", bos_token), ("eos_token", eos_token)) if v is not None})
    return _render(template, given, now or datetime.now())


def choose_template(templates: Mapping[str, str], *, name: str | None = None, tools: bool = False) -> str:
    """One of a tokenizer's templates: the named one, else "tool_use" when there are tools to offer, else "default".

    Raises OptionError when there is none of that name, StreamingError when there is none at all.
    """
    if not templates:
        raise StreamingError(
            "the model has no chat template (tokenizer_config.json, chat_template.jinja or tokenizer.chat_template); "
            "use generate with a plain prompt instead of chat"
        )
    wanted = name or ("tool_use" if tools and "tool_use" in templates else DEFAULT_TEMPLATE)
    if wanted not in templates:
        raise OptionError(f"there is no chat template {wanted!r}; the model has: {', '.join(sorted(templates))}")
    return templates[wanted]


def _render(template: str, given: Mapping[str, Any], now: datetime) -> str:
    if find_spec("jinja2") is None:
        raise StreamingError("chat templates need the package jinja2, which is not installed: pip install jinja2")
    return render_apart(template, given, now=now)
