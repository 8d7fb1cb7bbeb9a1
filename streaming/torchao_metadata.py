"""What torchao says of each tensor in the metadata of a checkpoint's safetensors headers. [no-torch]"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from streaming.checkpoint.files import strict_json
from streaming.checkpoint.safetensors import HEADER_LIMIT
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointError

if TYPE_CHECKING:
    from streaming.checkpoint.remote_file import WeightFile

_NAMES = "tensor_names"


def described_tensors(checkpoint: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """name -> class and attributes. The headers were checked when the checkpoint was opened.

    Raises CheckpointError where there are no such descriptions, or where they are no JSON objects.
    """
    if checkpoint.format != "safetensors":
        raise CheckpointError(f"{checkpoint.name}: is serialized by torchao, of which safetensors files can be read")
    found: dict[str, Mapping[str, Any]] = {}
    for file in checkpoint.files:
        metadata = _metadata(file)
        for name in _parsed(metadata, _NAMES, list, file) if _NAMES in metadata else ():
            if isinstance(name, str) and name in metadata:
                found[name] = _parsed(metadata, name, dict, file)
    if not found:
        raise CheckpointError(
            f"{checkpoint.name}: is quantized by torchao, but the metadata of its safetensors headers has no {_NAMES}: "
            "it was not written by torchao's safetensors support (0.15 or newer)"
        )
    return found


def _metadata(file: WeightFile) -> Mapping[str, str]:
    from streaming.file_ranges import open_ranges

    with closing(open_ranges(file)) as ranges:
        (prefix,) = ranges.read([(0, 8)])
        nbytes = int.from_bytes(prefix, "little")
        if nbytes > HEADER_LIMIT:
            raise CheckpointError(f"{file}: has changed since its header was read")
        (text,) = ranges.read([(8, nbytes)])
    found = strict_json(bytes(text)).get("__metadata__", {})
    assert isinstance(found, dict)  # as its first reading saw to
    return found


def _parsed(metadata: Mapping[str, str], key: str, kind: type, file: WeightFile) -> Any:
    try:
        found = strict_json(metadata[key].encode())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, kind):
        raise CheckpointError(f"{file}: the metadata of its header says {metadata[key][:60]!r} of {key[:200]!r}")
    return found
