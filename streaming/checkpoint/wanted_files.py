"""Which of a repository's files a load format needs, by their names alone: all that is ever asked for. [no-torch]

The order of the patterns is the one that opening a folder goes by (first match wins), so that what is fetched is what
is read. Names are relative to the repository; only those at its top are looked at, hence nothing in `original/` or its
like (the same weights again, in another layout), unless an index or the user names it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from streaming.checkpoint.members import BIN_INDEX, CONSOLIDATED, GGUF, INDEX, PICKLES, SAFETENSORS, SHARDED, Listing
from streaming.errors import CheckpointError

SMALL_FILES = ("*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
_HF = (SAFETENSORS, *PICKLES)
_PATTERNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "auto": (*_HF, GGUF), "hf": _HF, "pt": ("*.pt", "*.pth"), "npcache": ("*.bin",), "gguf": (GGUF,), "dummy": (),
        "mistral": (CONSOLIDATED, "consolidated*.pth"), "sharded_state": SHARDED[1:], "tensorizer": ("*.tensors",),
    }
)  # fmt: skip
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,9})-of-(?P<total>\d{5,9})(?P<suffix>\.\w+)")
_CONSOLIDATED_INDEX = "consolidated.safetensors.index.json"
_LISTED = 10  # names that a message gives one by one


def weight_patterns(load_format: str) -> tuple[str, ...]:
    """What a format looks for, the first that matches wins; those that read safetensors their own way: safetensors."""
    return _PATTERNS.get(load_format, (SAFETENSORS,))


def small_files(names: Iterable[str]) -> list[str]:
    """Configuration, tokenizer, index, chat template."""
    return list(_top(names).matching(*SMALL_FILES))


def weight_files(
    names: Collection[str], *, load_format: str, index: Mapping[str, str] | None = None, file: str | None = None
) -> list[str]:
    """The files that hold the weights.

    `index`: tensor -> file, where there is one; its files are taken and no others. `file`: the one GGUF file that the
    user names; the other parts of a numbered set come along. Raises CheckpointError where there are no weights, and
    where several GGUF models could be meant.
    """
    if file is not None:
        return _all_parts(file, names)
    top = _top(names)
    found = _first_match(top, load_format)
    if not found and weight_patterns(load_format):
        raise CheckpointError(_nothing_found(names, load_format))
    if found and found[0].endswith(".gguf"):
        return _one_model(found)
    if index is not None and index_name(found):
        return sorted(set(index.values()))
    return found


def quantized_file(quantization: str, names: Collection[str]) -> str:
    """The one GGUF model (the first part of a numbered set) whose name holds a quantization such as Q4_K_M, as a word
    of its own and in any case. Raises CheckpointError that lists them, where it is none or several."""
    models = sorted(name for name in names if _is_model(name))
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(quantization)}(?![A-Za-z0-9_])", re.IGNORECASE)
    if not (found := [name for name in models if word.search(Path(name).name)]):
        found = [name for name in models if word.search(name)]  # a folder for each is usual too
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{len(found)} GGUF models have {quantization} in their name: {_some(found)}; name the one that is meant, "
            f"as in owner/name/{found[0]}"
        )
    listed = f"there are {_some(models)}" if models else "there are no GGUF models at all"
    raise CheckpointError(f"no GGUF model has {quantization} in its name; {listed}")


def _is_model(name: str) -> bool:
    """Whether it is a GGUF model or the first part of one, and no projector of images or matrix of importances."""
    part = _NUMBERED.fullmatch(name)
    stem = Path(name).name.lower()
    beside = stem.startswith("mmproj") or "imatrix" in stem
    return name.endswith(".gguf") and not beside and (part is None or int(part["number"]) == 1)


def index_name(weights: Collection[str]) -> str | None:
    """The index that would go with such files; None for a kind of file that has none."""
    first = next(iter(weights), "")
    index = _CONSOLIDATED_INDEX if first.startswith("consolidated") else INDEX
    return {".safetensors": index, ".bin": BIN_INDEX}.get(Path(first).suffix)


def parts_missing(names: Collection[str]) -> bool:
    """Whether a set numbered -00001-of-0000N is not whole."""
    parts = [part for name in names if (part := _NUMBERED.fullmatch(name))]
    sets = Counter((part["stem"], part["total"], part["suffix"]) for part in parts)
    return any(count < int(total) for (_, total, _), count in sets.items())


def _top(names: Iterable[str]) -> Listing:
    return Listing(Path(), tuple(sorted(name for name in names if "/" not in name and not name.startswith("."))))


def _first_match(top: Listing, load_format: str) -> list[str]:
    if load_format == "auto" and SHARDED[0] in top:
        load_format = "sharded_state"
    for pattern in weight_patterns(load_format):
        if found := list(top.matching(pattern)):
            return [name for name in found if not name.startswith("consolidated")] or found
    return []


def _one_model(names: list[str]) -> list[str]:
    models = sorted({part["stem"] if (part := _NUMBERED.fullmatch(name)) else name for name in names})
    if len(models) == 1:
        return names
    firsts = [name for name in names if not (part := _NUMBERED.fullmatch(name)) or int(part["number"]) == 1]
    raise CheckpointError(
        f"{len(models)} GGUF models: {_some(firsts)}; name the one that is meant, as in owner/name/{firsts[0]}"
    )


def _all_parts(file: str, names: Collection[str]) -> list[str]:
    if file not in names:
        others = sorted(name for name in names if name.endswith(".gguf"))
        raise CheckpointError(f"no file {file}; its GGUF files are: {_some(others) or 'none'}")
    if (part := _NUMBERED.fullmatch(file)) is None:
        return [file]
    if int(part["total"]) > len(names):  # never count to what a name claims
        raise CheckpointError(f"{file} is one of {int(part['total'])} parts, and there are {len(names)} files in all")
    width, rest = len(part["number"]), f"-of-{part['total']}{part['suffix']}"
    wanted = {f"{part['stem']}-{number:0{width}}{rest}" for number in range(1, int(part["total"]) + 1)}
    if absent := sorted(wanted - set(names)):
        raise CheckpointError(f"{len(absent)} of {len(wanted)} parts of {file} are missing: {_some(absent)}")
    return sorted(wanted)


def _nothing_found(names: Collection[str], load_format: str) -> str:
    looked = f"no weights at its top; looked for {', '.join(weight_patterns(load_format))}"
    known = {pattern.removeprefix("*") for pattern in (*_HF, GGUF)}
    if other := sorted(name for name in names if Path(name).suffix in known):
        return f"{looked}; found {_some(other)}"
    return f"{looked}; found {_some(sorted(names)) or 'no files at all'}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
