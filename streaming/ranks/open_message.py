"""The message that tells followers what to open: the model's name and the user's options. [no-torch]"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from streaming.errors import OptionError, WorkerError
from streaming.options import LoadOptions
from streaming.ranks.channel import Message
from streaming.sources import Source

OPEN = "open"


def open_message(model: str, options: LoadOptions) -> Message:
    """What `opened` reads. Raises OptionError for an option whose value does not travel."""
    values: dict[str, Any] = {}
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name == "sources":
            value = [asdict(source) for source in options.sources]
        try:
            values[field.name] = json.loads(json.dumps(value, default=_plain))
        except (TypeError, ValueError, RecursionError):
            flag = f"--{field.name.replace('_', '-')}"
            raise OptionError(f"{flag}: holds what JSON does not know, so it cannot go to other ranks") from None
    return {"kind": OPEN, "model": model, "options": values}


def opened(message: Message) -> tuple[str, LoadOptions]:
    """The model and the options. Raises OptionError as LoadOptions does, WorkerError for another message."""
    try:
        values = dict(message["options"])
        sources = tuple(
            Source(**source | {"patterns": tuple(source["patterns"])}) for source in values.pop("sources")
        )  # fmt: skip
        return str(message["model"]), LoadOptions(**values, sources=sources)
    except (KeyError, TypeError, AttributeError) as error:
        raise WorkerError(f"rank 0 sent a model and options that cannot be understood ({error!r})") from None


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError
