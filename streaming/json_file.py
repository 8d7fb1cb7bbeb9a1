"""Reads one JSON object from a file, with errors that name the file and say where it is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from streaming.errors import CheckpointFormatError


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that `path` holds.

    Raises CheckpointFormatError when the file cannot be read, is not UTF-8 JSON, or holds something else.
    """
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointFormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except json.JSONDecodeError as error:
        raise CheckpointFormatError(
            f"{path}: is not JSON (line {error.lineno}, column {error.colno}: {error.msg}); fetch the file again"
        ) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise CheckpointFormatError(f"{path}: is not JSON ({error}); fetch the file again") from error
    if not isinstance(found, dict):
        raise CheckpointFormatError(f"{path}: holds a JSON {type(found).__name__}, an object was expected")
    return found
