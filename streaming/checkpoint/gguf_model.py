"""A model kept as GGUF: one file, or the numbered parts of one, as a checkpoint in Hugging Face's names. [no-torch]"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from streaming.checkpoint.files import states_before
from streaming.checkpoint.gguf import GgufHeader, read_gguf_header
from streaming.checkpoint.gguf_config import gguf_architecture, gguf_config
from streaming.checkpoint.gguf_families import GGUF_FAMILIES
from streaming.checkpoint.gguf_names import CONFIG_TENSORS, hub_name
from streaming.checkpoint.members import GGUF, hub_root_of, list_folder, member_fault
from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf")
_LISTED = 10
_OF_THE_MODEL = ("general.architecture", "general.name")  # what parts that repeat it must agree on
MOST_PARTS = 1000  # of one model; the largest real ones have some dozens


def open_gguf_folder(root: Path) -> Checkpoint:
    """The one GGUF model in a folder. CheckpointError when there is none, or more than one: then it lists them."""
    names = list_folder(root).matching(GGUF)
    first_names = [name for name in names if _part_number(name) in (None, 1)]
    models = first_names or list(names[:1])
    if not models:
        raise CheckpointError(f"{root}: no weights; looked for {GGUF}")
    if len(models) > 1:
        more = f" and {len(models) - _LISTED} more" if len(models) > _LISTED else ""
        raise CheckpointError(
            f"{root}: {len(models)} GGUF models: {', '.join(models[:_LISTED])}{more}; give the path of one of them"
        )
    return replace(open_gguf_file(root / models[0]), root=root)


def open_gguf_file(path: Path) -> Checkpoint:
    """The model in one GGUF file; given any of a model's numbered parts, all of them are taken.

    Raises CheckpointError for what is missing or not supported, CheckpointFormatError for broken files.
    """
    parts = [path.with_name(name) for name in part_names(path.name, where=str(path))]
    states = states_before(parts)
    return replace(gguf_checkpoint(path, _read_parts(parts)), states=states)


def gguf_checkpoint(root: Path, headers: list[GgufHeader]) -> Checkpoint:
    """The model of these files' headers, wherever they lie; those of a set in its order. Raises CheckpointError."""
    check_parts(headers)
    first = headers[0]
    architecture = gguf_architecture(first)
    tensors = _merge(headers)
    config = gguf_config(first, tensors)
    return Checkpoint(
        root=root,
        format="gguf",
        tensors=_rename(tensors, architecture, config),
        files=tuple(header.file for header in headers),
        config=config,
        metadata=first.metadata,
        notes=tuple(_notes(headers)),
    )


def _part_number(name: str) -> int | None:
    part = _PART.fullmatch(name)
    return int(part["number"]) if part else None


def part_names(name: str, *, where: str) -> list[str]:
    """The file itself, or all parts that its name says there are. CheckpointError for more than any model has."""
    part = _PART.fullmatch(name)
    if part is None:
        return [name]
    total, number = int(part["total"]), int(part["number"])
    if not 1 <= number <= total <= MOST_PARTS:
        raise CheckpointError(
            f"{where}: its name says that it is part {number} of {total}; parts are numbered from 1, and at most "
            f"{MOST_PARTS} are read"
        )
    return [f"{part['stem']}-{number:05}-of-{part['total']}.gguf" for number in range(1, total + 1)]


def _read_parts(files: list[Path]) -> list[GgufHeader]:
    report = Report(files[0].parent)
    headers = []
    hub_root = hub_root_of(files[0].parent)
    for file in files:
        if fault := member_fault(file, hub_root):
            report.add(f"{file}: {fault}")
            continue
        try:
            headers.append(read_gguf_header(file))
        except CheckpointError as error:
            report.absorb(error)
    report.raise_if_any()
    return headers


def check_parts(headers: list[GgufHeader]) -> None:
    """Metadata must agree with the files' names: a part renamed to stand alone is half a model. CheckpointError."""
    report = Report(headers[0].file)
    for number, header in enumerate(headers):
        count, own = header.metadata.get("split.count") or 1, header.metadata.get("split.no") or 0
        if count != len(headers) or own != number:
            report.add(
                f"{header.file}: says that it is part {own} of {count} (counted from 0), "
                f"its name says {number} of {len(headers)}",
                broken=True,
            )
    for header in headers[1:]:
        for key in _OF_THE_MODEL:
            own, first = header.metadata.get(key), headers[0].metadata.get(key)
            if own is not None and own != first:
                report.add(f"{header.file}: {key} is {own!r}, in {headers[0].file.name} it is {first!r}", broken=True)
    wanted = headers[0].metadata.get("split.tensors.count")
    found = sum(len(header.tensors) for header in headers)
    if not report and wanted is not None and wanted != found:
        report.add(f"{headers[0].file}: its parts should hold {wanted} tensors, they hold {found}", broken=True)
    report.raise_if_any()


def _merge(headers: list[GgufHeader]) -> dict[str, TensorInfo]:
    report = Report(headers[0].file)
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                report.add(f"tensor {name!r} is in {tensors[name].file} and in {info.file}", broken=True)
            tensors[name] = info
    if not tensors:
        report.add(f"{headers[0].file}: holds no tensors", broken=True)
    report.raise_if_any()
    return tensors


def _rename(tensors: Mapping[str, TensorInfo], architecture: str, config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    report = Report(next(iter(tensors.values())).file)
    renamed: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if name in CONFIG_TENSORS:
            continue
        ours = hub_name(name, architecture)
        heads = _interleaved_heads(ours, architecture, config)
        if heads and info.shape[0] % (2 * heads):
            report.add(
                f"{info.file}: tensor {name!r} has {info.shape[0]} rows, which are not {heads} heads of an even size",
                broken=True,
            )
        if ours in renamed:
            report.add(f"{info.file}: two tensors are {ours!r}", broken=True)
        shift = GGUF_FAMILIES[architecture].norm_shift if ours.endswith("norm.weight") else 0.0
        renamed[ours] = replace(info, name=ours, rope_heads=heads, shift=shift)
    report.raise_if_any()
    return renamed


def _interleaved_heads(name: str, architecture: str, config: Mapping[str, Any]) -> int:
    """Heads whose rows llama.cpp's converter interleaves: q and k of llama and its kin, so that rotary pairs are
    neighbours."""
    if not GGUF_FAMILIES[architecture].interleaved:
        return 0
    module = name.rpartition(".")[0]
    if module.endswith(".q_proj"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if module.endswith(".k_proj") else 0


def _notes(headers: list[GgufHeader]) -> Iterator[str]:
    for header in headers:
        if header.trailing_nbytes:
            yield f"{header.file}: {header.trailing_nbytes} bytes after the last tensor are left out"
