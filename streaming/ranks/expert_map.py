"""`--expert-map`: which rank holds which experts, redundant ones included. [no-torch]

A list with one list of expert numbers for each expert-parallel rank, such as [[0, 1], [2, 3, 0]]: as JSON, as a file of
it, or as the lists themselves. Whether the numbers fit the model is seen when its configuration is known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from streaming.errors import OptionError

_LARGEST_FILE = 16 << 20  # bytes: the numbers of a million experts


def parse_expert_map(value: str | Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The experts of each rank. Raises OptionError that says what stands in a list's place."""
    found = _read(value) if isinstance(value, str) else value
    if not isinstance(found, (list, tuple)) or not found:
        raise OptionError(f"--expert-map {found!r:.60}: a list of lists of expert numbers is needed, one for each rank")
    return tuple(_experts(rank, experts) for rank, experts in enumerate(found))


def _read(text: str) -> object:
    if not text.lstrip().startswith("["):
        text = _file_text(Path(text))
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--expert-map: is no JSON ({error})") from None


def _file_text(path: Path) -> str:
    """Every rank reads it, and more than once: a pipe or a device will not do."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise OptionError(f"--expert-map {path}: is no regular file, which every rank could read")
        if path.stat().st_size > _LARGEST_FILE:
            raise OptionError(f"--expert-map {path}: is larger than any expert map")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"--expert-map {path}: {error.strerror}; a list of lists, or a file of it, is needed"
        ) from None
    except UnicodeDecodeError:
        raise OptionError(f"--expert-map {path}: is not UTF-8 text") from None


def _experts(rank: int, experts: object) -> tuple[int, ...]:
    if not isinstance(experts, (list, tuple)) or not experts:
        raise OptionError(f"--expert-map: rank {rank} has {experts!r:.60} where a list of expert numbers is needed")
    wrong = next((expert for expert in experts if type(expert) is not int or expert < 0), None)
    if wrong is not None:
        raise OptionError(f"--expert-map: rank {rank} has {wrong!r:.60}, which is no expert's number")
    return tuple(experts)
