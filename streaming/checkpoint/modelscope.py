"""Fetching from ModelScope by its own package, where FIRSTLAYER_USE_MODELSCOPE asks for it. [no-torch]

It is asked in place of the hub, its cache included: a model of the same name there need not have the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streaming.checkpoint.hub import HubId, is_offline
from streaming.checkpoint.hub_location import USE_MODELSCOPE
from streaming.checkpoint.members import list_folder
from streaming.checkpoint.wanted_files import SMALL_FILES, weight_patterns
from streaming.errors import CheckpointError, OptionError


def fetch_from_modelscope(model: HubId, *, load_format: str = "auto") -> Path:
    """The model's folder (or its one GGUF file) in ModelScope's cache, fetched where it is not there.

    Patterns are asked for one after the other, the first that brings weights is the last. Raises OptionError without
    the package, CheckpointError with its reason in words.
    """
    if model.quantization is not None:
        raise OptionError(
            f"{model.repo}:{model.quantization}: a quantization is looked up in the hub's list of files, and "
            f"{USE_MODELSCOPE} is set; name the file: {model.repo}/FILE.gguf"
        )
    download = _client()
    weights = [[model.file]] if model.file else [[pattern] for pattern in weight_patterns(load_format)] or [[]]
    for patterns in weights:
        folder = _download(download, model, [*SMALL_FILES, *patterns])
        if model.file and (folder / model.file).exists():
            return folder / model.file
        if not patterns or list_folder(folder).matching(*patterns):
            return folder
    looked = ", ".join(pattern for patterns in weights for pattern in patterns)
    raise CheckpointError(f"{model.repo}: no weights on ModelScope ({USE_MODELSCOPE} is set); looked for {looked}")


def _client() -> Any:
    try:
        from modelscope import snapshot_download  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise OptionError(f"{USE_MODELSCOPE} needs ModelScope's own package: pip install modelscope") from error
    return snapshot_download


def _download(download: Any, model: HubId, patterns: list[str]) -> Path:
    try:
        folder = download(
            model.repo,
            revision=None if model.revision == "main" else model.revision,  # its default branch has another name
            local_files_only=is_offline(),
            allow_patterns=patterns,
            ignore_patterns=["original/*"] if model.file else ["*/*"],  # what is not at the top is not the model
        )
    except Exception as error:  # the package's own, its http library's, the system's: all mean "not fetched"
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CheckpointError(
            f"{model.repo}: revision {model.revision!r} could not be fetched from ModelScope "
            f"({USE_MODELSCOPE} is set): {reason}"
        ) from error
    return Path(folder)
