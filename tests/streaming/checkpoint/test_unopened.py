"""Files from which nothing is used are not opened: the index and the family say so before any header is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from examples.write_tiny_model import TinyModel, config_of, random_tensor, tensor_shapes
from streaming import LLM
from streaming.checkpoint import open_checkpoint
from streaming.cli import run
from streaming.errors import CheckpointError
from streaming.options import LoadOptions
from streaming.prepare import prepare
from tests.streaming.checkpoint.hub_server import Hub
from tests.streaming.remote.range_server import serving

MODEL = TinyModel(layers=3, files=1)
IDS = [3, 17, 99, 4]
INDEX = "model.safetensors.index.json"


def write(folder: Path, config: dict[str, Any], *, prefix: str, elsewhere: dict[str, str]) -> Path:
    """The model's tensors in one file; `elsewhere`: tensors that the index places in files that are no safetensors."""
    folder.mkdir()
    tensors = {prefix + name: random_tensor(name, shape=shape, model=MODEL) for name, shape in tensor_shapes(MODEL)}
    kept = {name: tensor for name, tensor in tensors.items() if name not in elsewhere}
    save_file(kept, folder / "language.safetensors")
    for file in elsewhere.values():
        (folder / file).write_bytes(b"no header in here")
    (folder / "config.json").write_text(json.dumps(config))
    index = {"weight_map": dict.fromkeys(kept, "language.safetensors") | elsewhere}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def logits_of(folder: Path) -> Any:
    with LLM(folder) as llm:
        return llm.logits(IDS).numpy()


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "whole", config_of(MODEL), prefix="", elsewhere={})


def test_a_vision_towers_file_is_not_opened(whole: Path, tmp_path: Path) -> None:
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": config_of(MODEL),
    }
    towers = {"vision_tower.a.weight": "vision.safetensors", "multi_modal_projector.b.weight": "vision.safetensors"}
    folder = write(tmp_path / "llava", config, prefix="language_model.", elsewhere=towers)
    assert [file.name for file in open_checkpoint(str(folder)).files] == ["language.safetensors"]
    plan = prepare(str(folder), LoadOptions()).plan
    assert set(plan.dropped) == set(towers)
    assert list(plan.unused.values()) == [len(b"no header in here")]
    assert np.array_equal(logits_of(folder), logits_of(whole))


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    """A model with a vision tower in a file of its own."""
    config = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": config_of(MODEL),
    }
    tower = {"vision_tower.a.weight": "vision.safetensors"}
    return write(tmp_path / "seeing", config, prefix="language_model.", elsewhere=tower)


def test_from_the_hub_such_a_file_is_not_fetched(seeing: Path, hub: Hub) -> None:
    hub.add("acme/seeing", {path.name: path.read_bytes() for path in seeing.iterdir()})
    plan = prepare("acme/seeing", LoadOptions()).plan
    assert hub.fetched() == ["config.json", "language.safetensors", INDEX]
    assert (list(plan.dropped), dict(plan.unused)) == (["vision_tower.a.weight"], {})
    hub.requests.clear()
    assert prepare("acme/seeing", LoadOptions()).plan.read_nbytes == plan.read_nbytes
    assert hub.requests == []  # what is there is whole


def test_from_an_address_such_a_file_is_not_asked_for(
    seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLAYER_CACHE", str(tmp_path / "small"))
    with serving(seeing) as server:
        prepared = prepare(server.url, LoadOptions())
        assert prepared.plan.read_nbytes == prepare(str(seeing), LoadOptions()).plan.read_nbytes
        assert list(prepared.plan.dropped) == ["vision_tower.a.weight"]
        (file,) = prepared.checkpoint.unopened
        assert str(file.file) == f"{server.url}vision.safetensors"
        assert server.asked("vision.safetensors") == 0


def test_the_listing_of_files_tells_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    beyond = {name: "rest.safetensors" for name, _ in tensor_shapes(MODEL) if name.startswith("model.layers.2.")}
    folder = write(tmp_path / "more", config_of(MODEL) | {"num_hidden_layers": 2}, prefix="", elsewhere=beyond)
    assert run(["inspect", str(folder), "--files"]) == 0
    words = f"rest.safetensors: not opened, none of its {len(beyond)} tensors is used"
    assert capfd.readouterr().out.splitlines()[-1] == words
    assert run(["inspect", str(folder), "--files", "--json"]) == 0
    (file,) = json.loads(capfd.readouterr().out)["unopened"]
    assert (file["tensors"], file["file_bytes"]) == (len(beyond), 17)


def test_a_file_of_layers_too_many_is_not_opened_and_need_not_be_there(tmp_path: Path) -> None:
    beyond = {name: "rest.safetensors" for name, _ in tensor_shapes(MODEL) if name.startswith("model.layers.2.")}
    config = config_of(MODEL) | {"num_hidden_layers": 2}
    folder = write(tmp_path / "more", config, prefix="", elsewhere=beyond)
    plan = prepare(str(folder), LoadOptions()).plan
    assert plan.dropped == dict.fromkeys(beyond, "layer 2 lies beyond num_hidden_layers = 2")
    (folder / "rest.safetensors").unlink()
    assert prepare(str(folder), LoadOptions()).plan.read_nbytes == plan.read_nbytes


def test_a_file_with_one_tensor_that_is_used_is_opened(tmp_path: Path) -> None:
    mixed = {"vision_tower.a.weight": "mixed.safetensors", "model.norm.weight": "mixed.safetensors"}
    with pytest.raises(CheckpointError, match=r"mixed\.safetensors"):
        prepare(str(write(tmp_path / "mixed", config_of(MODEL), prefix="", elsewhere=mixed)), LoadOptions())


def test_without_an_index_every_file_is_opened(tmp_path: Path, whole: Path) -> None:
    (whole / INDEX).unlink()
    save_file({"model.layers.3.mlp.down_proj.weight": torch.ones(2, 2)}, whole / "rest.safetensors")
    checkpoint = open_checkpoint(str(whole))
    assert len(checkpoint.files) == 2
    assert checkpoint.unopened == ()
