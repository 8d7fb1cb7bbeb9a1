"""A chat template rendered by a process of its own, with limits of time and memory that the system keeps.

The sandbox counts rounds and measures sizes, but a template is a program: one call of a text method or one deeply
nested expression can take all memory, or overflow the interpreter's stack, before anything is counted. There it is the
small process that ends. It is given everything as JSON and gives back the text, or one line. [no-torch]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from streaming.errors import StreamingError

MAX_SECONDS = 30.0  # by the clock; a long conversation takes some milliseconds
MAX_CPU_SECONDS = 15  # of computing
MEMORY_NBYTES = 1 << 30  # of addresses; the interpreter with jinja2 takes about a tenth
_TOO_LONG = "the chat template was stopped: it ran for more than"
_WHOSE_FAULT = "the template is at fault, not the conversation"
_PROGRAM = "import sys; sys.path[:0] = sys.argv[1:]; from streaming.template_process import main; main()"
_ROOT = Path(__file__).parents[1]


def render_apart(template: str, given: Mapping[str, Any], *, now: datetime) -> str:
    """The text that the template makes of the variables `given`. Raises StreamingError, in one line."""
    try:
        job = json.dumps(
            {"template": template, "given": dict(given), "now": now.isoformat()}, default=_as_json
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StreamingError(f"the chat template cannot be given what is no JSON: {error}") from error
    paths = [path for path in sys.path if os.path.isabs(path)]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(_ROOT), *paths],
            input=job, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=MAX_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise StreamingError(f"{_TOO_LONG} {MAX_SECONDS:g} s; {_WHOSE_FAULT}") from None
    if done.returncode == -signal.SIGXCPU:
        raise StreamingError(f"{_TOO_LONG} {MAX_CPU_SECONDS} s; {_WHOSE_FAULT}")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise StreamingError(
            f"the chat template was stopped: it took more than {MEMORY_NBYTES >> 20} MiB of memory or nests too deeply "
            f"(its process ended with {done.returncode})"
        ) from None
    if "error" in found:
        raise StreamingError(found["error"])
    return str(found["text"])


def _as_json(value: object) -> object:
    """Mappings and sequences of other kinds than JSON's own."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"an object of type {type(value).__name__}")


def main() -> None:
    """Render the one job from standard input."""
    _limit()
    job = json.loads(sys.stdin.buffer.read())
    try:
        from streaming.template_sandbox import render_template

        text = render_template(job["template"], job["given"], now=datetime.fromisoformat(job["now"]))
        answer = {"text": text}
    except StreamingError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer))


def _limit() -> None:
    import resource

    limits = ((resource.RLIMIT_AS, MEMORY_NBYTES), (resource.RLIMIT_CPU, MAX_CPU_SECONDS), (resource.RLIMIT_CORE, 0))
    for kind, most in limits:
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
