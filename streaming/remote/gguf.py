"""A GGUF model on a server: one file or its numbered parts, their headers read by ranges that grow. [no-torch]"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from streaming.checkpoint.gguf import GgufHeader, parse_gguf
from streaming.checkpoint.gguf_model import gguf_checkpoint, part_names
from streaming.checkpoint.remote_file import RemoteFile
from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointError
from streaming.remote.address import folder_of, member_url
from streaming.remote.copies import choose_files
from streaming.remote.fetch_pool import FetchPool
from streaming.remote.header_bytes import HeaderBytes
from streaming.remote.ranges import RangeFetcher
from streaming.remote.small_files import private_folder
from streaming.remote.unmarked import unmarked_notes


def open_remote_gguf(url: str, *, copies: Path | None, pool: FetchPool) -> Checkpoint:
    """The model at the address of a .gguf file; given any of its numbered parts, all of them are taken.

    Its folder is not asked for anything else: tokenizer and configuration are the file's own metadata. Raises
    CheckpointError (CheckpointFormatError where a file is broken) with the problems of all files.
    """
    names = part_names(unquote(url.rpartition("/")[2]), where=url)
    urls = [member_url(folder_of(url), name) for name in names] if len(names) > 1 else [url]
    headers = _read_headers(urls, pool)
    found = gguf_checkpoint(private_folder(url), headers)
    files = choose_files([file for file in found.files if isinstance(file, RemoteFile)], copies)
    tensors = {name: replace(info, file=files[info.file]) for name, info in found.tensors.items()}
    notes = (*found.notes, *unmarked_notes(files))
    return replace(found, address=url, files=tuple(files.values()), tensors=tensors, notes=notes)


def _read_headers(urls: list[str], pool: FetchPool) -> list[GgufHeader]:
    jobs: list[Callable[[RangeFetcher], GgufHeader]] = [partial(_read_header, url) for url in urls]
    report, headers = Report(urls[0]), []
    for result in pool.run(jobs):
        if isinstance(result, CheckpointError):
            report.absorb(result)
        else:
            headers.append(result)
    report.raise_if_any()
    return headers


def _read_header(url: str, fetcher: RangeFetcher) -> GgufHeader:
    beginning = HeaderBytes(url, fetcher)
    return parse_gguf(beginning.file, size=beginning.file.nbytes, read=beginning.more)
