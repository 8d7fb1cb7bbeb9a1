"""What a model's files say about generating: end ids, and the sampling they recommend. [no-torch]"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointFormatError
from streaming.gguf_tokenizer import token_id


@dataclass(frozen=True)
class GenerationDefaults:
    """A model's own defaults; None where its files say nothing.

    `eos_ids`: every id that ends a generation, ascending. `top_k` 0: all tokens. `temperature` 0: greedy.
    """

    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_defaults(checkpoint: Checkpoint) -> GenerationDefaults:
    """The defaults of generation_config.json and config.json, or of a GGUF's metadata.

    End ids are the union of all sources. Raises CheckpointFormatError, naming file and key, for a value that is of
    the wrong type or cannot be.
    """
    if checkpoint.metadata:  # a GGUF's, or what save-shards kept of one
        return _from_gguf(checkpoint.metadata, checkpoint.name)
    folder = checkpoint.root if checkpoint.root.is_dir() else checkpoint.root.parent
    path = folder / "generation_config.json"
    generation = read_json_object(path) if path.is_file() else {}
    return defaults_from_configs(generation, checkpoint.config, folder=folder)


def defaults_from_configs(
    generation: Mapping[str, Any], config: Mapping[str, Any], *, folder: Path
) -> GenerationDefaults:
    """The same from the parsed files; `folder` is for messages."""
    path, config_path = str(folder / "generation_config.json"), str(folder / "config.json")
    text_config = config.get("text_config")
    eos = _ids(generation, "eos_token_id", path) | _ids(config, "eos_token_id", config_path)
    if isinstance(text_config, Mapping):
        eos |= _ids(text_config, "eos_token_id", config_path)
    bos = sorted(_ids(generation, "bos_token_id", path) or _ids(config, "bos_token_id", config_path))
    return GenerationDefaults(
        eos_ids=tuple(sorted(eos)),
        bos_id=bos[0] if bos else None,
        do_sample=_flag(generation, "do_sample", path),
        temperature=_number(generation, "temperature", path, least=0.0, most=math.inf),
        top_k=_whole(generation, "top_k", path),
        top_p=_number(generation, "top_p", path, least=0.0, most=1.0),
        min_p=_number(generation, "min_p", path, least=0.0, most=1.0),
        repetition_penalty=_number(generation, "repetition_penalty", path, least=_POSITIVE, most=math.inf),
    )


_POSITIVE = math.ulp(0.0)  # the least number above 0
_LARGEST = 1e30  # that is taken; JSON's whole numbers can be larger than any float


def _from_gguf(metadata: Mapping[str, Any], source: str) -> GenerationDefaults:
    """A GGUF names single ids: end of text, of a turn, of a message to a tool; newer ones also the sampling."""
    found = (token_id(metadata, f"tokenizer.ggml.{name}_token_id", source=source) for name in ("eos", "eot", "eom"))
    prefix = "general.sampling."
    return GenerationDefaults(
        eos_ids=tuple(sorted({index for index in found if index is not None})),
        bos_id=token_id(metadata, "tokenizer.ggml.bos_token_id", source=source),
        temperature=_number(metadata, prefix + "temp", source, least=0.0, most=math.inf),
        top_k=_whole(metadata, prefix + "top_k", source),
        top_p=_number(metadata, prefix + "top_p", source, least=0.0, most=1.0),
        min_p=_number(metadata, prefix + "min_p", source, least=0.0, most=1.0),
        repetition_penalty=_number(metadata, prefix + "penalty_repeat", source, least=_POSITIVE, most=math.inf),
    )


def _ids(entries: Mapping[str, Any], key: str, path: str) -> set[int]:
    """One id or a list of them; null, and -1 ("none" in some files), give no id."""
    value = entries.get(key)
    values = value if isinstance(value, list) else [value]
    for entry in values:
        if entry is not None and (isinstance(entry, bool) or not isinstance(entry, int) or entry < -1):
            raise CheckpointFormatError(f"{path}: {key} is {value!r:.60}; a token id or a list of them was expected")
    return {entry for entry in values if entry is not None and entry >= 0}


def _flag(entries: Mapping[str, Any], key: str, path: str) -> bool | None:
    value = entries.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointFormatError(f"{path}: {key} is {value!r:.60}; true or false was expected")
    return value


def _whole(entries: Mapping[str, Any], key: str, path: str) -> int | None:
    value = entries.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise CheckpointFormatError(f"{path}: {key} is {value!r:.60}; a whole number, 0 or more, was expected")
    return value


def _number(entries: Mapping[str, Any], key: str, path: str, *, least: float, most: float) -> float | None:
    value = entries.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= min(most, _LARGEST):
        above = "above 0" if least == _POSITIVE else f"of {least:g} or more"
        limit = f"from {least:g} to {most:g}" if most < math.inf else above
        raise CheckpointFormatError(f"{path}: {key} is {value!r:.60}; a number {limit} was expected")
    return float(value)
