"""Files that need not be opened: the index says that all they hold is dropped by name (a vision tower). [no-torch]

What a family does not use is known from config.json and the names in the index, before any header is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming.checkpoint.remote_file import WeightFile


@dataclass(frozen=True)
class Unopened:
    """One such file: its size, and why each of its tensors is not used."""

    file: WeightFile
    nbytes: int  # 0 where that was not asked for (a server's file, or one that is not there)
    reasons: Mapping[str, str]


def unopened_files(root: Path, index: Mapping[str, str], config: Mapping[str, Any]) -> Iterator[Unopened]:
    """The files of an index (tensor -> file) from which the model that the configuration describes uses nothing."""
    for file, reasons in unused_by_file(index, config).items():
        yield Unopened(root / file, _size(root / file), reasons)


def unused_by_file(index: Mapping[str, str], config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Their names, and why each of their tensors is not used.

    None of a configuration that cannot be read: whoever parses it next says what is wrong.
    """
    from layers.config import parse_config, weight_map
    from layers.errors import ModelConfigError
    from layers.name_lookup import NameLookup
    from layers.weights import Dropped

    try:
        names = NameLookup(weight_map(parse_config(config)))
    except ModelConfigError:
        return {}
    unused: dict[str, dict[str, str]] = {}
    by_file: dict[str, list[str]] = {}
    for name, file in index.items():
        by_file.setdefault(file, []).append(name)
    for file, tensors in by_file.items():
        reasons: dict[str, str] = {}
        for name in tensors:
            target = names.locate(name)
            if not isinstance(target, Dropped):
                break
            reasons[name] = target.reason
        else:
            unused[file] = reasons
    return unused


def _size(path: Path) -> int:
    """Its bytes; none where it is not there, which nobody would notice either."""
    return path.stat().st_size if path.is_file() else 0
