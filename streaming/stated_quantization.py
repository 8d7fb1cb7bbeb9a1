"""What a checkpoint says of its own quantization: in config.json, its text part, or a file beside it. [no-torch]"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quant.disk_forms.form import Method
from quant.disk_forms.methods import method_of
from quant.errors import QuantError
from streaming.checkpoint.members import read_member_object
from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointError

_KEYS = ("quantization_config", "compression_config")
_UNUSED_BY = ("gguf", "dummy")  # formats that hold no weights in another quantized form
# Files that writers of quantized models leave beside config.json, and the method that each speaks for.
SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def disk_method(checkpoint: Checkpoint) -> Method | None:
    """The method by which the checkpoint's weights are quantized; None where they are not.

    Raises CheckpointError for one that cannot be read, or that contradicts itself.
    """
    if checkpoint.saved is not None or checkpoint.format in _UNUSED_BY:
        return None
    found, where = _stated(checkpoint)
    if found is None:
        return None
    if found.get("quant_method") == "torchao":
        from quant.disk_forms.torchao import DESCRIBED
        from streaming.torchao_metadata import described_tensors

        found = {**found, DESCRIBED: described_tensors(checkpoint)}
    try:
        return method_of(found)
    except QuantError as error:
        raise CheckpointError(f"{where}: the checkpoint is already quantized: {error}") from error


def _stated(checkpoint: Checkpoint) -> tuple[Mapping[str, Any] | None, str]:
    """The quantization_config and where it stands."""
    for part in (checkpoint.config, checkpoint.config.get("text_config")):
        for key in _KEYS:
            found = part.get(key) if isinstance(part, Mapping) else None
            if found is not None:
                where = f"{checkpoint.name}: config.json: {key}"
                if not isinstance(found, Mapping):
                    raise CheckpointError(f"{where} is {str(found)[:60]!r}, not an object")
                return found, where
    return _beside(checkpoint)


def _beside(checkpoint: Checkpoint) -> tuple[Mapping[str, Any] | None, str]:
    folder = checkpoint.root if checkpoint.root.is_dir() else checkpoint.root.parent
    for name, method in SIDE_FILES.items():
        if (folder / name).is_file():
            report = Report(folder)
            found = read_member_object(folder / name, report)
            report.raise_if_any()
            return {"quant_method": method, **found}, f"{checkpoint.name}: {name}"
    return None, ""
