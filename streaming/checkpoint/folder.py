"""A Hugging Face model folder: which of its files hold the model, and in which of them each tensor lies. [no-torch]

One kind of files is the model: the first of the kinds asked for that is there. With an index, the files that it names
and no others; without one, every file of that kind. Whatever is wrong in any of them (and in config.json) comes in one
error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from streaming.checkpoint.file_kinds import HF_KINDS, FileKind, Header
from streaming.checkpoint.files import states_before
from streaming.checkpoint.index import read_index
from streaming.checkpoint.members import (
    CONFIG,
    PARAMS,
    PICKLES,
    SAFETENSORS,
    Listing,
    hub_root_of,
    list_folder,
    member_fault,
    read_member_object,
)
from streaming.checkpoint.parts import Part, check_has_part
from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.checkpoint.unopened import unopened_files
from streaming.errors import CheckpointError

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,9})-of-(?P<total>\d{5,9})(?P<suffix>\.(safetensors|bin|pt|pth))")
_NAMED = 5  # missing files that a message names one by one


def open_weights_folder(
    root: Path,
    *,
    kinds: tuple[FileKind, ...] = HF_KINDS,
    part: bool = False,
    patterns: tuple[str, ...] = (),
    of_model: Part = Part.LANGUAGE,
) -> Checkpoint:
    """The checkpoint in a folder of weight files and a config.json. `kinds`: those asked for, the preferred first.

    `part`: it is a further source of a model, which needs no config.json; `patterns`: only files of these names are
    taken, whatever an index says; `of_model`: files that the index shows to hold nothing of this part of the model are
    not opened. Raises CheckpointError (CheckpointFormatError where a file is broken) with all problems of all files.
    """
    listing = list_folder(root)
    report = Report(root)
    config = {} if part else _read_config(root, report)
    check_has_part(root, of_model)
    if patterns:
        listing = Listing(root, listing.matching(*patterns))
    kind = _choose_kind(listing, kinds)
    if kind is None:
        report.add(_nothing_found(listing, kinds))
        report.raise_if_any()
    assert kind is not None
    has_index = kind.index is not None and kind.index in listing
    index = _read_index(root, kind, report) if has_index else None
    unopened = tuple(unopened_files(root, index, config, part=of_model)) if index and config else ()
    if index and unopened:
        left_out = {name for file in unopened for name in file.reasons}
        index = {name: file for name, file in index.items() if name not in left_out}
        if not index:
            report.add(f"{root / str(kind.index)}: places no tensor of the model's {of_model.value} part")
            report.raise_if_any()
    names = sorted(set(index.values())) if index is not None else _names_of(listing, kind)
    if not has_index and not patterns:
        for gap in _gaps(names):
            report.add(f"{root}: {gap}")
    files = _usable_files(root, names, report, source=f" ({kind.index} names it)" if index is not None else "")
    states = states_before(files)
    headers, notes = _read_headers(files, kind, report)
    if index is None and has_index:
        report.raise_if_any()  # nothing says where the tensors should be
    tensors, placed = _place(headers, index, root, kind, complete=len(headers) == len(names), report=report)
    report.raise_if_any()
    return Checkpoint(
        root=root, format=kind.format, tensors=tensors, files=tuple(files), config=config, metadata={},
        notes=(*notes, *placed), unopened=unopened, states=states,
    )  # fmt: skip


def open_weights_file(path: Path, *, kind: FileKind, part: bool = False) -> Checkpoint:
    """The checkpoint in one file, with the config.json beside it. `part` and what is raised: as for the folder."""
    report = Report(path)
    if not part:
        refuse_one_of_many(path.name, what=str(path), folder=str(path.parent))
    config = {} if part else _read_config(path.parent, report)
    states = states_before([path])
    headers, notes = _read_headers([path], kind, report)
    tensors, placed = _place(headers, None, path.parent, kind, complete=bool(headers), report=report)
    report.raise_if_any()
    return Checkpoint(
        root=path, format=kind.format, tensors=tensors, files=(path,), config=config, metadata={},
        notes=(*notes, *placed), states=states,
    )  # fmt: skip


def refuse_one_of_many(name: str, *, what: str, folder: str) -> None:
    """Raise CheckpointError for a file whose name says that it is one of several: the folder is the model."""
    if (numbered := _NUMBERED.fullmatch(name)) and int(numbered["total"]) > 1:
        raise CheckpointError(
            f"{what}: is file {int(numbered['number'])} of {int(numbered['total'])}; give the folder, {folder}"
        )


def _read_config(root: Path, report: Report) -> dict[str, Any]:
    path = root / CONFIG
    if not os.path.lexists(path):
        report.add(f"{path}: is missing; a Hugging Face model folder has its configuration there")
        return {}
    return read_member_object(path, report)


def _choose_kind(listing: Listing, kinds: tuple[FileKind, ...]) -> FileKind | None:
    """The first kind that files are there of; else one whose index is there, so that what it misses is named."""
    files = next((kind for kind in kinds if listing.matching(kind.pattern)), None)
    return files or next((kind for kind in kinds if kind.index is not None and kind.index in listing), None)


def _read_index(root: Path, kind: FileKind, report: Report) -> dict[str, str] | None:
    assert kind.index is not None
    path = root / kind.index
    if fault := member_fault(path, hub_root_of(root)):
        report.add(f"{path}: {fault}")
        return None
    try:
        return read_index(path, suffix=kind.suffix)
    except CheckpointError as error:
        report.absorb(error)
        return None


def _names_of(listing: Listing, kind: FileKind) -> list[str]:
    """All files of the kind, those left out that hold the same weights again in Meta's and Mistral's own layout."""
    names = list(listing.matching(kind.pattern))
    return [name for name in names if not name.startswith("consolidated")] or names


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


def _nothing_found(listing: Listing, kinds: tuple[FileKind, ...]) -> str:
    patterns = [kind.pattern for kind in kinds]
    looked = f"{listing.root}: no weights; looked for {', '.join(patterns)}"
    other = (*listing.matching(SAFETENSORS, *PICKLES, "*.gguf"), *listing.strays(*patterns))
    if other:
        return f"{looked}; found only {', '.join(other[:_NAMED])}"
    if PARAMS in listing:
        return f"{looked}; found {PARAMS}: Mistral's own layout, but no consolidated files"
    return looked


def _gaps(names: list[str]) -> Iterator[str]:
    """What is missing of files numbered -00001-of-0000N, one line for each set of them."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if numbered := _NUMBERED.fullmatch(name):
            sets.setdefault((numbered["stem"], numbered["total"], numbered["suffix"]), set()).add(
                int(numbered["number"])
            )
    for (stem, total, suffix), present in sets.items():
        wanted = range(1, int(total) + 1)
        count = len(wanted) - sum(number in wanted for number in present)
        if count:
            first = islice((number for number in wanted if number not in present), _NAMED)
            listed = ", ".join(f"{stem}-{number:0{len(total)}}-of-{total}{suffix}" for number in first)
            more = f" and {count - _NAMED} more" if count > _NAMED else ""
            yield f"{count} of {len(wanted)} files missing: {listed}{more} (the download is incomplete)"


def _read_headers(files: list[Path], kind: FileKind, report: Report) -> tuple[dict[Path, Header], list[str]]:
    """The tensors of each file, and notes for the user."""
    headers: dict[Path, Header] = {}
    notes: list[str] = []
    for file in files:
        try:
            headers[file], found = kind.read_header(file)
        except CheckpointError as error:
            report.absorb(error)
        else:
            notes += found
    return headers, notes


def _place(
    headers: Mapping[Path, Header],
    index: Mapping[str, str] | None,
    root: Path,
    kind: FileKind,
    *,
    complete: bool,
    report: Report,
) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Where each tensor is read from, and notes for the user; two candidates and no index to decide is a problem."""
    tensors, copies = _gather(headers)
    for name, found in copies.items():
        named = root / index[name] if index is not None and name in index else None
        chosen = next((info for info in found if info.file == named), None)
        if chosen is None:
            report.add(_twice(name, found, kind))
        tensors[name] = chosen or found[0]
    if complete:
        _check_found(tensors, index or {}, root, kind, report)
    misplaced = list(_misplaced(headers, tensors, index, root)) if index is not None else []
    return tensors, tuple(_misplaced_note(misplaced, kind))


def _gather(headers: Mapping[Path, Header]) -> tuple[dict[str, TensorInfo], dict[str, list[TensorInfo]]]:
    """The tensors of all files, and those that several of them hold. Files without a common name, that is nearly all,
    are merged at once: a large model has a hundred thousand tensors."""
    tensors: dict[str, TensorInfo] = {}
    copies: dict[str, list[TensorInfo]] = {}
    for header in headers.values():
        if tensors.keys().isdisjoint(header):
            tensors.update(header)
            continue
        for name, info in header.items():
            if name in tensors:
                copies.setdefault(name, [tensors[name]]).append(info)
            else:
                tensors[name] = info
    return tensors, copies


def _misplaced(
    headers: Mapping[Path, Header], tensors: Mapping[str, TensorInfo], index: Mapping[str, str], root: Path
) -> Iterator[tuple[TensorInfo, Path]]:
    """Each tensor that is read from another file than the index says, and the file that it says."""
    for path, header in headers.items():
        here = str(path.relative_to(root))
        for name in header:
            if index.get(name, here) != here and tensors[name] is header[name]:
                yield tensors[name], root / index[name]


def _twice(name: str, found: list[TensorInfo], kind: FileKind) -> str:
    files = " and ".join(str(info.file) for info in found)
    index = f", and no {kind.index} says which is meant; remove one or add the index" if kind.index else "; remove one"
    return f"tensor {name!r} is in {files}{index}"


def _check_found(
    tensors: Mapping[str, TensorInfo], index: Mapping[str, str], root: Path, kind: FileKind, report: Report
) -> None:
    if not tensors and not report:
        report.add(f"{root}: its {kind.suffix.removeprefix('.')} files hold no tensors")
    for name, file in index.items():
        if name not in tensors:
            report.add(
                f"{root / str(kind.index)}: places tensor {name!r} in {file}, which does not hold it, "
                "nor does any other"
            )


def _misplaced_note(misplaced: list[tuple[TensorInfo, Path]], kind: FileKind) -> Iterator[str]:
    if not misplaced:
        return
    info, named = misplaced[0]
    others = f" (and {len(misplaced) - 1} more tensors)" if len(misplaced) > 1 else ""
    yield f"{kind.index} places {info.name!r}{others} in {named.name}; it was found, and is read, in {info.file.name}"
