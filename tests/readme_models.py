"""What the README's `my-model`, `owner/name` and `host` stand for when its commands are run: tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel, write_tiny_model
from tests.streaming.checkpoint.build import write_gguf
from tests.streaming.checkpoint.hub_server import Hub, serve
from tests.streaming.checkpoint.test_mistral import write as write_mistral
from tests.streaming.remote.range_server import serving

HOST = "https://host/"


@contextmanager
def stand_ins(folder: Path, text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The commands with the server's address in place of HOST, and the environment in which they run; the models lie in
    the folder meanwhile."""
    if "my-model" not in text:
        yield text, {"HF_HUB_OFFLINE": "1"}
        return
    write_models(folder)
    files = {path.name: path.read_bytes() for path in (folder / "my-model").iterdir()}
    hub = Hub()
    hub.add(
        "owner/name",
        files | {name: (folder / "model.gguf").read_bytes() for name in ("model.gguf", "model-Q4_K_M.gguf")},
    )
    with serve(hub), serving(folder) as server:
        own = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
        yield text.replace(HOST, server.url), own | {"FIRSTLAYER_CACHE": str(folder / "small")}


def write_models(folder: Path) -> None:
    """The same tiny model in each layout."""
    whole = write_tiny_model(folder / "my-model", model=TinyModel(files=1))
    tensors = load_file(whole / "model.safetensors")
    for name, file in (("my-bin", "pytorch_model.bin"), ("my-pt", "model.pt")):
        torch.save(tensors, with_config(folder / name, whole) / file)
    save_file({"weight": tensors.pop("lm_head.weight")}, with_config(folder / "my-head", whole) / "head.safetensors")
    save_file(tensors, with_config(folder / "my-text", whole) / "model.safetensors")
    write_mistral(folder / "my-mistral")
    write_gguf(folder / "model.gguf")


def with_config(folder: Path, of: Path) -> Path:
    """A new folder with a model's configuration."""
    folder.mkdir()
    (folder / "config.json").write_bytes((of / "config.json").read_bytes())
    return folder
