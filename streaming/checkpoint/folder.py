"""A Hugging Face model folder: which of its files hold the model, and in which of them each tensor lies. [no-torch]

With an index, the files that it names and no others; without one, every *.safetensors file. Whatever is wrong in any
of them (and in config.json) comes in one error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.index import read_index
from streaming.checkpoint.members import (
    CONFIG,
    CONSOLIDATED,
    INDEX,
    PARAMS,
    PICKLES,
    SAFETENSORS,
    Listing,
    hub_root_of,
    list_folder,
    member_fault,
)
from streaming.checkpoint.report import Report
from streaming.checkpoint.safetensors import read_safetensors_header
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,9})-of-(?P<total>\d{5,9})\.safetensors")
_NAMED = 5  # missing files that a message names one by one

Header = Mapping[str, TensorInfo]


def open_safetensors_folder(root: Path, *, patterns: tuple[str, ...] = (SAFETENSORS, *PICKLES)) -> Checkpoint:
    """The checkpoint in a folder of safetensors files and a config.json. `patterns`: what to say was looked for.

    Raises CheckpointError (CheckpointFormatError where a file is broken) with all problems of all files.
    """
    listing = list_folder(root)
    report = Report(root)
    config = _read_config(root, report)
    index = _read_index(root, report) if INDEX in listing else None
    names = _choose_names(listing, index, patterns, report)
    files = _usable_files(root, names, report, source=f" ({INDEX} names it)" if index is not None else "")
    headers = _read_headers(files, report)
    if index is None and INDEX in listing:
        report.raise_if_any()  # nothing says where the tensors should be
    tensors, notes = _place(headers, index, root, complete=len(headers) == len(names), report=report)
    report.raise_if_any()
    return Checkpoint(
        root=root, format="safetensors", tensors=tensors, files=tuple(files), config=config, metadata={}, notes=notes
    )


def open_safetensors_file(path: Path) -> Checkpoint:
    """The checkpoint in one safetensors file, with the config.json beside it. Raises as the folder does."""
    report = Report(path)
    if (numbered := _NUMBERED.fullmatch(path.name)) and int(numbered["total"]) > 1:
        raise CheckpointError(
            f"{path}: is file {int(numbered['number'])} of {int(numbered['total'])}; give the folder, {path.parent}"
        )
    config = _read_config(path.parent, report)
    headers = _read_headers([path], report)
    tensors, notes = _place(headers, None, path.parent, complete=bool(headers), report=report)
    report.raise_if_any()
    return Checkpoint(
        root=path, format="safetensors", tensors=tensors, files=(path,), config=config, metadata={}, notes=notes
    )


def _read_config(root: Path, report: Report) -> dict[str, Any]:
    path = root / CONFIG
    if not os.path.lexists(path):
        report.add(f"{path}: is missing; a Hugging Face model folder has its configuration there")
        return {}
    if fault := member_fault(path, hub_root_of(root)):
        report.add(f"{path}: {fault}")
        return {}
    try:
        return read_json_object(path)
    except CheckpointError as error:
        report.absorb(error)
        return {}


def _read_index(root: Path, report: Report) -> dict[str, str] | None:
    if fault := member_fault(root / INDEX, hub_root_of(root)):
        report.add(f"{root / INDEX}: {fault}")
        return None
    try:
        return read_index(root / INDEX)
    except CheckpointError as error:
        report.absorb(error)
        return None


def _choose_names(
    listing: Listing, index: Mapping[str, str] | None, patterns: tuple[str, ...], report: Report
) -> list[str]:
    """The files that hold the model, whether they are there or not."""
    if index is not None:
        return sorted(set(index.values()))
    names = list(listing.matching(SAFETENSORS))
    names = [name for name in names if name not in listing.matching(CONSOLIDATED)] or names
    if INDEX not in listing:
        _check_unindexed(names, listing, patterns, report)
    return names  # where there is an index that cannot be read, they are looked at for what else is wrong


def _check_unindexed(names: list[str], listing: Listing, patterns: tuple[str, ...], report: Report) -> None:
    if not names:
        report.add(_nothing_found(listing, patterns))
    for gap in _gaps(names):
        report.add(f"{listing.root}: {gap}")


def _usable_files(root: Path, names: list[str], report: Report, *, source: str) -> list[Path]:
    """Those files that are there and may be followed; the others are reported."""
    hub_root = hub_root_of(root)
    usable = []
    for path in (root / name for name in names):
        if fault := member_fault(path, hub_root):
            report.add(f"{path}: {fault}{source}")
        else:
            usable.append(path)
    return usable


def _nothing_found(listing: Listing, patterns: tuple[str, ...]) -> str:
    looked = f"{listing.root}: no weights; looked for {', '.join(patterns)}"
    if pickles := listing.matching(*PICKLES):
        return (
            f"{looked}; found {', '.join(pickles[:_NAMED])}: PyTorch's own format is not supported yet; "
            "convert the model to safetensors"
        )
    if other := (*listing.matching("*.gguf"), *listing.strays(SAFETENSORS, *PICKLES)):
        return f"{looked}; found only {', '.join(other[:_NAMED])}"
    if PARAMS in listing:
        return f"{looked}; found {PARAMS}: Mistral's own layout (consolidated files) is not supported yet"
    return looked


def _gaps(names: list[str]) -> Iterator[str]:
    """What is missing of files numbered -00001-of-0000N, one line for each set of them."""
    sets: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if numbered := _NUMBERED.fullmatch(name):
            sets.setdefault((numbered["stem"], numbered["total"]), set()).add(int(numbered["number"]))
    for (stem, total), present in sets.items():
        wanted = range(1, int(total) + 1)
        count = len(wanted) - sum(number in wanted for number in present)
        if count:
            first = islice((number for number in wanted if number not in present), _NAMED)
            listed = ", ".join(f"{stem}-{number:0{len(total)}}-of-{total}.safetensors" for number in first)
            more = f" and {count - _NAMED} more" if count > _NAMED else ""
            yield f"{count} of {len(wanted)} files missing: {listed}{more} (the download is incomplete)"


def _read_headers(files: list[Path], report: Report) -> dict[Path, Header]:
    headers: dict[Path, Header] = {}
    for file in files:
        try:
            headers[file] = read_safetensors_header(file)
        except CheckpointError as error:
            report.absorb(error)
    return headers


def _place(
    headers: Mapping[Path, Header], index: Mapping[str, str] | None, root: Path, *, complete: bool, report: Report
) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Where each tensor is read from, and notes for the user; two candidates and no index to decide is a problem."""
    places: dict[str, list[TensorInfo]] = {}
    for header in headers.values():
        for name, info in header.items():
            places.setdefault(name, []).append(info)
    tensors, misplaced = {}, []
    for name, found in places.items():
        named = root / index[name] if index is not None and name in index else None
        chosen = next((info for info in found if info.file == named), found[0])
        if len(found) > 1 and chosen.file != named:
            report.add(_twice(name, found))
        if named is not None and chosen.file != named:
            misplaced.append((chosen, named))
        tensors[name] = chosen
    if complete:
        _check_found(tensors, index or {}, root, report)
    return tensors, tuple(_misplaced_note(misplaced))


def _twice(name: str, found: list[TensorInfo]) -> str:
    files = " and ".join(str(info.file) for info in found)
    return f"tensor {name!r} is in {files}, and no {INDEX} says which is meant; remove one or add the index"


def _check_found(tensors: Mapping[str, TensorInfo], index: Mapping[str, str], root: Path, report: Report) -> None:
    if not tensors and not report:
        report.add(f"{root}: its safetensors files hold no tensors")
    for name, file in index.items():
        if name not in tensors:
            report.add(f"{root / INDEX}: places tensor {name!r} in {file}, which does not hold it, nor does any other")


def _misplaced_note(misplaced: list[tuple[TensorInfo, Path]]) -> Iterator[str]:
    if not misplaced:
        return
    info, named = misplaced[0]
    others = f" (and {len(misplaced) - 1} more tensors)" if len(misplaced) > 1 else ""
    yield f"{INDEX} places {info.name!r}{others} in {named.name}; it was found, and is read, in {info.file.name}"
