"""Runs a template that nobody vouches for: jinja2's sandbox, with limits. [no-torch]

The sandbox keeps a template from Python's internals; it does not keep it from running forever or from filling the
memory. So every loop is made to count its rounds, every call is counted, and what grows (`+`, `*`, `**`, `~`, widths
given to filters and text methods, the output) is measured. The counting is put in by rewriting the parsed template.
This stops endless loops and runaway growth and says what it was; a single call made to be expensive is stopped by the
limits of the process that this runs in (see `template_process.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from streaming.errors import StreamingError

MAX_STEPS = 250_000  # rounds of all loops, and calls, of one rendering; a long conversation needs some thousands
MAX_SIZE = 16 * 1024 * 1024  # characters of the output or of any text, entries of any list, any width
MAX_SECONDS = 30.0  # for what is slow without many steps
_MAX_BITS = 128  # of whole numbers that are computed


def render_template(source: str, given: Mapping[str, Any], *, now: datetime) -> str:
    """The text that the template makes of the variables `given`. Raises StreamingError, in one line."""
    try:
        environment = _Environment(now)
        template = environment.from_string(_Counting().visit(environment.parse(source)))
        return "".join(_measured(template.generate(given), environment.limits))
    except _RefusalError as refusal:
        raise StreamingError(f"the chat template refuses this conversation: {_one_line(refusal)}") from refusal
    except _LimitError as error:
        raise StreamingError(f"the chat template was stopped: {error}") from error
    except SecurityError as error:
        raise StreamingError(f"the chat template tried what it must not: {_one_line(error)}") from error
    except MemoryError as error:
        raise StreamingError("the chat template was stopped: it took more memory than it may") from error
    except RecursionError as error:
        raise StreamingError("the chat template was stopped: it nests or calls itself too deeply") from error
    except TemplateSyntaxError as error:
        raise StreamingError(f"the chat template is broken in line {error.lineno}: {_one_line(error)}") from error
    except Exception as error:  # whatever foreign code can raise
        raise StreamingError(f"the chat template failed: {type(error).__name__}: {_one_line(error)}") from error


class _RefusalError(TemplateError):
    """The template called raise_exception."""


class _LimitError(Exception):
    """The template ran too long or grew too large."""


class _Limits:
    """What one rendering has used of its allowance."""

    def __init__(self) -> None:
        self._steps = 0
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self) -> None:
        """Count a round of a loop or a call."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _LimitError(
                f"its loops made more than {MAX_STEPS} rounds; the template is at fault, not the conversation"
            )
        if time.monotonic() > self._deadline:
            raise _LimitError(f"it ran for more than {MAX_SECONDS:g} s; the template is at fault, not the conversation")

    @staticmethod
    def size(value: Any) -> Any:
        """`value` again, if it is not too large."""
        found = len(value) if isinstance(value, _SIZED) else value if isinstance(value, int) else 0
        if abs(found) > MAX_SIZE:
            raise _LimitError(f"it made a text, a list or a width larger than {MAX_SIZE}")
        return value

    @staticmethod
    def bits(count: int) -> None:
        """Refuse a whole number of so many bits."""
        if count > _MAX_BITS:
            raise _LimitError(f"it computed a number of {count} bits")


_SIZED = (str, list, tuple, dict)


def _measured(pieces: Iterable[str], limits: _Limits) -> Iterator[str]:
    total = 0
    for piece in pieces:
        limits.step()
        total += len(piece)
        if total > MAX_SIZE:
            raise _LimitError(f"its text is longer than {MAX_SIZE} characters")
        yield piece


class _Counting(NodeTransformer):
    """Rewrites a parsed template: loops count their rounds; concatenations and filters' arguments are measured."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - jinja2's naming
        self.generic_visit(node)
        node.iter = _through("_counted", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _through("_measured", node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        if node.name in _FILTERS_WITH_A_WIDTH:
            node.args = [_through("_measured", argument) for argument in node.args]
            for pair in node.kwargs:
                pair.value = _through("_measured", pair.value)
        return node


_FILTERS_WITH_A_WIDTH = frozenset({"batch", "center", "indent", "slice", "tojson", "truncate", "wordwrap"})


def _through(name: str, value: nodes.Node) -> nodes.Filter:
    """The expression `value|name`."""
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with Hugging Face's additions, for one rendering."""

    # `*` and `**` are measured before they run, `+` after: it can only double.
    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self, now: datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension])
        self.limits = _Limits()
        self.filters["tojson"] = _to_json
        self.filters["_counted"] = self._counted
        self.filters["_measured"] = self._measured
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = now.strftime
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]  # text of any length for the asking

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Size checks around the intercepted operators."""
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, _SIZED) and isinstance(times, int):
                    self.limits.size(len(repeated) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self.limits.bits(left.bit_length() * abs(right))
        found = super().call_binop(context, operator, left, right)
        if isinstance(found, int):
            self.limits.bits(found.bit_length())
            return found
        return self.limits.size(found)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        """A call: counted; of Python's own methods (`ljust` and its like) the arguments are measured."""
        __self.limits.step()
        if isinstance(__obj, BuiltinMethodType):
            for value in (*args, *kwargs.values()):
                __self.limits.size(value)
        if isinstance(__obj, LoopContext) and args:  # `loop(children)` of a recursive loop
            args = (__self._counted(__context, args[0]), *args[1:])
        return super().call(__context, __obj, *args, **kwargs)

    @pass_context  # a filter with a context is never run while the template is compiled
    def _counted(self, context: Context, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.limits.step()
            yield value

    @pass_context
    def _measured(self, context: Context, value: Any) -> Any:
        return self.limits.size(value)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the model's own words for training; here just its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The content of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """jinja2's namespace without names that begin with an underscore, which Python itself might look at."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be one of the names
        own, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"the name {name!r} in a namespace")


def _refuse(message: object) -> None:
    raise _RefusalError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "..."


_LONGEST_MESSAGE = 300
