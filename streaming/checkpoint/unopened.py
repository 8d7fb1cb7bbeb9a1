"""Files that need not be opened: the index says that nothing in them is of the part that is asked for. [no-torch]

What a family does not use (a vision tower), or what is not its encoder where that alone is asked for, is known from
config.json and the names in the index, before any header is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming.checkpoint.parts import Part, reasons
from streaming.checkpoint.remote_file import WeightFile


@dataclass(frozen=True)
class Unopened:
    """One such file: its size, and why each of its tensors is not used."""

    file: WeightFile
    nbytes: int  # 0 where that was not asked for (a server's file, or one that is not there)
    reasons: Mapping[str, str]


def unopened_files(
    root: Path, index: Mapping[str, str], config: Mapping[str, Any], *, part: Part = Part.LANGUAGE
) -> Iterator[Unopened]:
    """The files of an index (tensor -> file) from which this part of the model that the configuration describes uses
    nothing. OptionError where there is no such part."""
    for file, found in unused_by_file(index, config, part=part).items():
        yield Unopened(root / file, _size(root / file), found)


def unused_by_file(
    index: Mapping[str, str], config: Mapping[str, Any], *, part: Part = Part.LANGUAGE
) -> dict[str, dict[str, str]]:
    """Their names, and why each of their tensors is not used.

    None of a configuration that cannot be read: whoever parses it next says what is wrong.
    """
    from layers.errors import ModelConfigError

    try:
        reason_of = reasons(config, part)
    except ModelConfigError:
        return {}
    unused: dict[str, dict[str, str]] = {}
    by_file: dict[str, list[str]] = {}
    for name, file in index.items():
        by_file.setdefault(file, []).append(name)
    for file, tensors in by_file.items():
        found: dict[str, str] = {}
        for name in tensors:
            reason = reason_of(name)
            if reason is None:
                break
            found[name] = reason
        else:
            unused[file] = found
    return unused


def _size(path: Path) -> int:
    """Its bytes; none where it is not there, which nobody would notice either."""
    return path.stat().st_size if path.is_file() else 0
