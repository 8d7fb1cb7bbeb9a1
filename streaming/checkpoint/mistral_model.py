"""A model in Mistral's own layout: params.json and consolidated files, as a checkpoint in Hugging Face's names.

Meta's Llama came in it too. The rows of q and k lie interleaved, so that the two numbers that a rotary embedding turns
together are neighbours, as in llama.cpp's files of the same models: `TensorInfo.rope_heads`. [no-torch]
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from layers.config_fields import Fields
from streaming.checkpoint.file_kinds import PT_KINDS, SAFETENSORS_KIND, FileKind
from streaming.checkpoint.files import states_before
from streaming.checkpoint.index import read_index
from streaming.checkpoint.members import (
    CONSOLIDATED,
    PARAMS,
    Listing,
    hub_root_of,
    list_folder,
    member_fault,
    read_member_object,
)
from streaming.checkpoint.mistral_config import mistral_config
from streaming.checkpoint.mistral_names import hub_name
from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError

_PICKLED = "consolidated*.pth"  # Meta's
_PATTERNS = ((CONSOLIDATED, SAFETENSORS_KIND), (_PICKLED, PT_KINDS[-1]))  # the first that is there is the model
_INDEX = "consolidated.safetensors.index.json"
_NUMBERED = re.compile(r"consolidated-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors", re.ASCII)
_NAMED = 5  # missing files that a message names one by one


def open_mistral(path: Path) -> Checkpoint:
    """The checkpoint in a folder with params.json and consolidated files, or in one such file.

    Raises CheckpointError (CheckpointFormatError where a file is broken) with all problems of all files, and
    ModelConfigError for what params.json says and cannot be read.
    """
    root = path if path.is_dir() else path.parent
    report = Report(path)
    params = _read_params(root, report)
    names, kind = _choose(path, report)
    states = states_before(root / name for name in names)
    headers, notes = _read_headers(root, names, kind, report)
    stored = _merge(headers, report)
    report.raise_if_any()
    embedding = stored.get("tok_embeddings.weight")
    rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    config, remarks = mistral_config(Fields(params, where=str(root / PARAMS)), vocab_rows=rows)
    return Checkpoint(
        root=path,
        format=kind.format,
        tensors=_rename(stored, config, path),
        files=tuple(root / name for name in names),
        config=config,
        metadata={},
        notes=(*notes, *remarks),
        states=states,
    )


def _read_params(root: Path, report: Report) -> dict[str, Any]:
    path = root / PARAMS
    if not os.path.lexists(path):
        report.add(f"{path}: is missing; Mistral's own layout has its configuration there")
        return {}
    return read_member_object(path, report)


def _choose(path: Path, report: Report) -> tuple[tuple[str, ...], FileKind]:
    """The names of the files that hold the model, and what they are."""
    listing = list_folder(path) if path.is_dir() else Listing(path.parent, (path.name,))
    for pattern, kind in _PATTERNS:
        if names := listing.matching(pattern):
            return (names if path.is_file() else _complete(listing, names, report)), kind
    report.add(f"{path}: no weights in Mistral's own layout; looked for {CONSOLIDATED}, {_PICKLED}")
    return (), SAFETENSORS_KIND


def _complete(listing: Listing, names: tuple[str, ...], report: Report) -> tuple[str, ...]:
    """All files that the index names, or that belong together by their numbers; the missing ones are reported."""
    wanted = set(names)
    if _INDEX in listing and names[0].endswith(".safetensors"):
        try:
            wanted = set(read_index(listing.root / _INDEX).values())
        except CheckpointError as error:
            report.absorb(error)
    else:
        for total in {int(part["total"]) for name in names if (part := _NUMBERED.fullmatch(name))}:
            wanted |= {f"consolidated-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)}
    if missing := sorted(wanted - set(listing.names)):
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        report.add(
            f"{listing.root}: {len(missing)} of {len(wanted)} files missing: {', '.join(missing[:_NAMED])}{more} "
            "(the download is incomplete)"
        )
    return tuple(sorted(wanted & set(listing.names)))


def _read_headers(
    root: Path, names: tuple[str, ...], kind: FileKind, report: Report
) -> tuple[list[Mapping[str, TensorInfo]], list[str]]:
    headers: list[Mapping[str, TensorInfo]] = []
    notes: list[str] = []
    for file in (root / name for name in names):
        if fault := member_fault(file, hub_root_of(root)):
            report.add(f"{file}: {fault}")
            continue
        try:
            tensors, remarks = kind.read_header(file)
        except CheckpointError as error:
            report.absorb(error)
            continue
        headers.append(tensors)
        notes += remarks
    return headers, notes


def _merge(headers: list[Mapping[str, TensorInfo]], report: Report) -> dict[str, TensorInfo]:
    """All tensors by their stored names. Meta's largest models are cut for several GPUs: each file a part of each."""
    tensors: dict[str, TensorInfo] = {}
    twice = [(tensors[name], info) for header in headers for name, info in header.items() if _seen(tensors, info)]
    if twice:
        one, other = twice[0]
        others = f" (and {len(twice) - 1} more tensors)" if len(twice) > 1 else ""
        report.add(
            f"tensor {one.name!r}{others} is in {one.file} and in {other.file}: files that are a model cut for several "
            "GPUs are not supported; use the model's Hugging Face layout"
        )
    if headers and not tensors and not report:
        report.add("its consolidated files hold no tensors")
    return tensors


def _seen(tensors: dict[str, TensorInfo], info: TensorInfo) -> bool:
    return tensors.setdefault(info.name, info) is not info


def _rename(stored: Mapping[str, TensorInfo], config: Mapping[str, Any], path: Path) -> dict[str, TensorInfo]:
    report = Report(path)
    renamed: dict[str, TensorInfo] = {}
    for name, info in stored.items():
        ours = hub_name(name)
        heads = _interleaved_heads(ours, config)
        if heads and (not info.shape or info.shape[0] % (2 * heads)):
            report.add(
                f"{info.file}: tensor {name!r} is {list(info.shape)}: its rows are not {heads} heads of an even size",
                broken=True,
            )
        if ours in renamed:
            report.add(f"{info.file}: two tensors are {ours!r}", broken=True)
        renamed[ours] = replace(info, name=ours, rope_heads=heads)
    report.raise_if_any()
    return renamed


def _interleaved_heads(name: str, config: Mapping[str, Any]) -> int:
    module = name.rpartition(".")[0]
    if module.endswith(".self_attn.q_proj"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if module.endswith(".self_attn.k_proj") else 0
