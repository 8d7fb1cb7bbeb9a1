"""A Hugging Face model folder on a server: its index, and its safetensors headers by ranges. [no-torch]

A server cannot be asked for a list of its files, so the index names them; without one there is model.safetensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.folder import refuse_one_of_many
from streaming.checkpoint.index import read_index
from streaming.checkpoint.members import CONFIG, INDEX
from streaming.checkpoint.parts import Part, check_has_part, gguf_has_none
from streaming.checkpoint.remote_file import RemoteFile
from streaming.checkpoint.report import Report
from streaming.checkpoint.safetensors import parse_safetensors
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.checkpoint.unopened import Unopened, unused_by_file
from streaming.errors import CheckpointError
from streaming.remote.address import (
    GGUF_SUFFIX,
    REMOTE_KINDS,
    check_address,
    folder_of,
    is_file_address,
    member_url,
)
from streaming.remote.copies import choose_files
from streaming.remote.faults import RemoteMissingError
from streaming.remote.fetch_pool import FetchPool
from streaming.remote.header_bytes import HeaderBytes
from streaming.remote.ranges import RangeFetcher, RetryPolicy
from streaming.remote.small_files import fetch_small_files
from streaming.remote.unmarked import unmarked_notes

SINGLE = "model.safetensors"

Header = Mapping[str, TensorInfo]
_DEFAULT_POLICY = RetryPolicy()


def open_remote(
    model: str, *, copies: Path | None = None, policy: RetryPolicy = _DEFAULT_POLICY, part: Part = Part.LANGUAGE
) -> Checkpoint:
    """The checkpoint at an address: of a folder, of one .safetensors file with its config.json beside it, or of a .gguf
    file (any part of one).

    `copies`: a folder in which whole files are kept for the next load, and looked up; `part`: files that the index
    shows to hold nothing of this part of the model are not asked for. Raises OptionError for addresses
    that cannot work, CheckpointError (CheckpointFormatError where a file is broken) with the problems of all files.
    """
    url = check_address(model)
    refuse_one_of_many(url.rpartition("/")[2], what=url, folder=folder_of(url))
    with closing(FetchPool(policy=policy)) as pool:
        if url.endswith(GGUF_SUFFIX):
            if part is Part.ENCODER:
                raise gguf_has_none(url)
            from streaming.remote.gguf import open_remote_gguf

            return open_remote_gguf(url, copies=copies, pool=pool)
        return _open(url, folder_of(url), copies, pool, part)


def _open(url: str, folder: str, copies: Path | None, pool: FetchPool, part: Part) -> Checkpoint:
    root, notes = fetch_small_files(folder, pool=pool)
    report = Report(url)
    config = _read_config(root, folder, report)
    index = None if is_file_address(url) else _read_index(root, folder, report)
    report.raise_if_any()
    check_has_part(root, part)
    unused = unused_by_file(index, config, part=part) if index else {}
    if index and not (index := {name: file for name, file in index.items() if file not in unused}):
        raise CheckpointError(f"{member_url(folder, INDEX)}: places no tensor of the model's {part.value} part")
    urls = _weight_urls(url, folder, index)
    headers = _read_headers(urls, report, source=f" ({INDEX} names it)" if index else "", pool=pool)
    report.raise_if_any()
    tensors = _place(headers, index or {}, folder, report)
    report.raise_if_any()
    files = choose_files(headers, copies)
    if copies is not None:
        tensors = {name: replace(info, file=files[info.file]) for name, info in tensors.items()}
    return Checkpoint(
        root=root, format="safetensors", tensors=tensors, files=tuple(files.values()), config=config, metadata={},
        notes=(*notes, *unmarked_notes(headers)), address=url,
        unopened=tuple(Unopened(RemoteFile(member_url(folder, file), 0), 0, unused[file]) for file in unused),
    )  # fmt: skip


def _read_config(root: Path, folder: str, report: Report) -> dict[str, object]:
    if not (root / CONFIG).exists():
        report.add(f"{member_url(folder, CONFIG)}: is missing; {REMOTE_KINDS}")
        return {}
    try:
        return read_json_object(root / CONFIG)
    except CheckpointError as error:
        report.absorb(_at_its_address(error, root, folder))
        return {}


def _read_index(root: Path, folder: str, report: Report) -> dict[str, str] | None:
    if not (root / INDEX).exists():
        return None
    try:
        return read_index(root / INDEX)
    except CheckpointError as error:
        report.absorb(_at_its_address(error, root, folder))
        return None


def _at_its_address(error: CheckpointError, root: Path, folder: str) -> CheckpointError:
    """The same problems, naming the file on the server in place of its local twin."""
    problems = tuple(problem.replace(f"{root}/", folder) for problem in error.problems)
    return type(error)(str(error).replace(f"{root}/", folder), problems)


def _weight_urls(url: str, folder: str, index: Mapping[str, str] | None) -> list[str]:
    if is_file_address(url):
        return [url]
    return [member_url(folder, name) for name in sorted(set(index.values()) if index else {SINGLE})]


def _read_headers(urls: list[str], report: Report, *, source: str, pool: FetchPool) -> dict[RemoteFile, Header]:
    jobs: list[Callable[[RangeFetcher], tuple[RemoteFile, Header]]] = [partial(_read_header, url) for url in urls]
    headers: dict[RemoteFile, Header] = {}
    for result in pool.run(jobs):
        if isinstance(result, RemoteMissingError):
            report.add(f"{result}{source or f'; neither is {INDEX}, so no other file is known: {REMOTE_KINDS}'}")
        elif isinstance(result, CheckpointError):
            report.absorb(result)
        else:
            headers[result[0]] = result[1]
    return headers


def _read_header(url: str, fetcher: RangeFetcher) -> tuple[RemoteFile, Header]:
    beginning = HeaderBytes(url, fetcher)
    file = beginning.file
    return file, parse_safetensors(file, size=file.nbytes, read=beginning.exactly)


def _place(
    headers: Mapping[RemoteFile, Header], index: Mapping[str, str], folder: str, report: Report
) -> dict[str, TensorInfo]:
    """Every tensor once, in the file that the index names where it names one."""
    tensors: dict[str, TensorInfo] = {}
    for header in headers.values():
        for name, info in header.items():
            named = member_url(folder, index[name]) if name in index else None
            if named is not None and str(info.file) != named:
                report.add(f"{info.file}: holds tensor {name!r}, which {INDEX} places in {named}", broken=True)
            elif name in tensors:
                report.add(f"tensor {name!r} is in {tensors[name].file} and in {info.file}, and {INDEX} names neither")
            else:
                tensors[name] = info
    for name, file in index.items():
        if name not in tensors and not report:
            report.add(f"{member_url(folder, INDEX)}: places tensor {name!r} in {file}, which does not hold it")
    if not tensors and not report:
        report.add(f"{folder}: its safetensors files hold no tensors")
    return tensors
