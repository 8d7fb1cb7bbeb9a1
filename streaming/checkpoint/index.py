"""`model.safetensors.index.json` and its like, read strictly: which file each tensor should be in. [no-torch]"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import MOST_TENSORS
from streaming.errors import CheckpointFormatError

_MOST_FILES = 10_000  # the largest models have some hundred


def read_index(path: Path, *, suffix: str = ".safetensors") -> dict[str, str]:
    """Tensor name -> file name, relative to the index's folder and inside it. `suffix`: of the files that it may name.

    Raises CheckpointFormatError with every problem: no weight_map, names that are no strings, files that would lead
    out of the folder (an absolute path, a ".." part) or are of another kind.
    """
    weight_map = read_json_object(path, strict=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointFormatError(f'{path}: its "weight_map" should be an object: tensor name -> file name')
    if len(weight_map) > MOST_TENSORS:
        raise CheckpointFormatError(f"{path}: places {len(weight_map):,} tensors; at most {MOST_TENSORS:,} are read")
    report = Report(path)
    files = {file for file in weight_map.values() if isinstance(file, str)}
    if len(files) > _MOST_FILES:
        raise CheckpointFormatError(f"{path}: names {len(files):,} files; at most {_MOST_FILES:,} are read")
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            report.add(f"{path}: tensor {tensor!r} is mapped to {file!r}, not to a file name", broken=True)
    for file in sorted(files):
        if fault := _name_fault(file, suffix):
            report.add(f"{path}: file name {file!r} {fault}", broken=True)
    report.raise_if_any()
    spelled = {file: str(PurePosixPath(file)) for file in files}  # once for each file: there are far more tensors
    return {tensor: spelled[file] for tensor, file in weight_map.items()}


def _name_fault(name: str, suffix: str) -> str | None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return "leads outside the model's folder, which is not allowed"
    if not name.isprintable():
        return "holds control characters"
    if path.suffix != suffix:
        return f"is not a {suffix} file"
    return None
