"""Asked for the encoder alone, language files are not opened: local folders, the hub, addresses, the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from examples.write_tiny_model import TinyModel
from streaming import CheckpointError, OptionError, open_encoder
from streaming.checkpoint.remote_file import WeightFile
from streaming.cli import run
from streaming.file_ranges import LocalRanges
from streaming.open_files import FileState
from tests.streaming.checkpoint.hub_server import Hub
from tests.streaming.remote.range_server import serving

INDEX = "model.safetensors.index.json"
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": {}}
QWEN3_VL = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": {}}


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % 23 - 11).to(dtype).view(shape)


LLAVA_ENCODER = {
    "vision_tower.vision_model.embeddings.patch_embedding.weight": values(4, 3, 2, 2, dtype=torch.bfloat16),
    "vision_tower.vision_model.post_layernorm.bias": values(5),
    "multi_modal_projector.linear_1.weight": values(6, 4, dtype=torch.float16),
    "image_newline": values(6),
}
LLAVA_TEXT = {
    "language_model.model.embed_tokens.weight": values(8, 4),
    "language_model.model.layers.0.vision_tower.weight": values(3),  # the word is there, the beginning is not
    "language_model.lm_head.weight": values(8, 4),
}
QWEN_ENCODER = {
    "model.visual.patch_embed.proj.weight": values(4, 3, 2, 2, 2, dtype=torch.bfloat16),
    "model.visual.merger.norm.weight": values(4),
    "model.visual.position_ids": torch.arange(3),
    "model.visual.logit_scale": torch.tensor(2.5),
}
QWEN_TEXT = {"model.language_model.layers.0.visual.weight": values(3), "lm_head.weight": values(8, 4)}
Write = Callable[[dict[str, Tensor], Path], None]


def write(folder: Path, config: dict[str, Any], files: dict[str, dict[str, Tensor]]) -> Path:
    """A folder whose index places these tensors."""
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def as_pipe(path: Path) -> None:
    """A named pipe in the file's place: whoever opens it fails or hangs."""
    path.unlink()
    os.mkfifo(path)


@pytest.fixture
def llava(tmp_path: Path) -> Path:
    """Tower and projector in two files, and the language part in a third that cannot be opened."""
    names = list(LLAVA_ENCODER)
    files = {
        "tower.safetensors": {name: LLAVA_ENCODER[name] for name in names[:2]},
        "language.safetensors": LLAVA_TEXT,
        "projector.safetensors": {name: LLAVA_ENCODER[name] for name in names[2:]},
    }
    folder = write(tmp_path / "llava", LLAVA, files)
    as_pipe(folder / "language.safetensors")
    return folder


@pytest.fixture
def qwen3_vl(tmp_path: Path) -> Path:
    """One file of the vision tower and of one tensor of language, and one of language that is not there."""
    mixed = {**QWEN_ENCODER, "lm_head.weight": QWEN_TEXT["lm_head.weight"]}
    language = {name: tensor for name, tensor in QWEN_TEXT.items() if name not in mixed}
    files = {"mixed.safetensors": mixed, "language.safetensors": language}
    folder = write(tmp_path / "qwen", QWEN3_VL, files)
    (folder / "language.safetensors").unlink()
    return folder


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name


def nbytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def test_tower_and_projector_are_read_and_the_language_file_is_not_opened(llava: Path) -> None:
    weights = open_encoder(llava)
    assert weights.bytes_read == 0
    assert_same(dict(weights.items()), LLAVA_ENCODER)
    assert weights.bytes_read == weights.nbytes == nbytes_of(LLAVA_ENCODER)


def test_of_a_file_that_holds_both_the_encoders_bytes_alone_are_read(qwen3_vl: Path) -> None:
    weights = open_encoder(qwen3_vl)
    assert_same(dict(weights.items()), QWEN_ENCODER)
    assert weights.bytes_read == nbytes_of(QWEN_ENCODER)


def test_one_tensor_by_its_name_reads_its_bytes_alone(llava: Path) -> None:
    weights = open_encoder(llava)
    name = "multi_modal_projector.linear_1.weight"
    assert name in weights
    assert len(weights) == 4
    assert torch.equal(weights[name], LLAVA_ENCODER[name])
    assert weights.bytes_read == LLAVA_ENCODER[name].nbytes
    with pytest.raises(KeyError, match="lm_head"):
        weights["language_model.lm_head.weight"]
    assert_same({name: weights[name] for name in weights}, LLAVA_ENCODER)


@pytest.mark.parametrize("piece_nbytes", [1, 7, 48, 1000])
def test_pieces_are_read_in_file_order_and_few_at_a_time(
    piece_nbytes: int, llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, list[tuple[int, int]]]] = []

    class Watched(LocalRanges):
        def __init__(self, path: Path, *, state: FileState | None) -> None:
            super().__init__(path, state=state)
            self._name = path.name

        def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
            asked.append((self._name, list(ranges)))
            return super().read(ranges)

    def watched(file: WeightFile, *, state: FileState | None = None) -> Watched:
        assert isinstance(file, Path)
        return Watched(file, state=state)

    monkeypatch.setattr("streaming.encoder.PIECE_NBYTES", piece_nbytes)
    monkeypatch.setattr("streaming.encoder.open_ranges", watched)
    weights = open_encoder(llava)
    assert_same(dict(weights.items()), LLAVA_ENCODER)
    flat = [(name, offset, nbytes) for name, ranges in asked for offset, nbytes in ranges]
    assert flat == sorted(flat, key=lambda piece: (piece[0] != "projector.safetensors", piece[1]))
    assert max(nbytes for _, _, nbytes in flat) <= piece_nbytes
    assert max(len(ranges) for _, ranges in asked) <= 4
    assert sum(nbytes for _, _, nbytes in flat) == nbytes_of(LLAVA_ENCODER)


def test_a_file_that_is_written_to_after_its_header_is_named(llava: Path) -> None:
    weights = open_encoder(llava)
    with (llava / "tower.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match=r"tower\.safetensors"):
        dict(weights.items())


def test_files_of_pytorch_give_views_as_they_were_saved(tmp_path: Path) -> None:
    turned = values(4, 6).t()
    (tmp_path / "config.json").write_text(json.dumps(LLAVA))
    torch.save({"vision_tower.a.weight": turned, "multi_modal_projector.b": values(3)}, tmp_path / "tower.bin")
    weight_map = {"vision_tower.a.weight": "tower.bin", "multi_modal_projector.b": "tower.bin"}
    weight_map["lm_head.weight"] = "language.bin"  # which is not there
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = dict(open_encoder(tmp_path).items())
    assert_same(found, {"vision_tower.a.weight": turned, "multi_modal_projector.b": values(3)})
    assert found["vision_tower.a.weight"].is_contiguous()


def test_without_an_index_one_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL))
    save_file({**QWEN_ENCODER, **QWEN_TEXT}, tmp_path / "model.safetensors")
    for model in (tmp_path, tmp_path / "model.safetensors"):
        weights = open_encoder(model)
        assert_same(dict(weights.items()), QWEN_ENCODER)
        assert weights.bytes_read == nbytes_of(QWEN_ENCODER)


def test_the_kind_of_the_text_part_does_not_matter(llava: Path) -> None:
    config = {**LLAVA, "text_config": {"model_type": "mamba"}}
    (llava / "config.json").write_text(json.dumps(config))
    assert set(open_encoder(llava)) == set(LLAVA_ENCODER)


# --- what has no encoder ----------------------------------------------------------------------------------------------


def test_a_text_model_is_told_in_one_line(
    tiny_folder: Callable[[TinyModel], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_folder(TinyModel(layers=1, files=1))
    with pytest.raises(OptionError, match=r"LlamaForCausalLM is a text model, which has no encoder; .* llava, "):
        open_encoder(folder)
    assert run(["inspect", str(folder), "--part", "encoder"]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_files_without_any_of_the_encoder_are_told(tmp_path: Path) -> None:
    split = write(tmp_path / "split", LLAVA, {"language.safetensors": LLAVA_TEXT})
    as_pipe(split / "language.safetensors")
    with pytest.raises(CheckpointError, match=r"index\.json: places no tensor of the model's encoder part"):
        open_encoder(split)
    single = write(tmp_path / "single", LLAVA, {"model.safetensors": LLAVA_TEXT})
    (single / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"none of 3 tensors is of the encoder: .* vision_tower\."):
        open_encoder(single)


def test_a_gguf_model_and_formats_of_language_alone_are_refused(tmp_path: Path, llava: Path) -> None:
    (tmp_path / "quants").mkdir()
    for folder in (tmp_path, tmp_path / "quants"):
        (folder / "q4.gguf").write_bytes(b"GGUF")
    for model in (tmp_path / "q4.gguf", tmp_path / "quants", "https://127.0.0.1:1/q4.gguf"):
        with pytest.raises(OptionError, match=r"(q4\.gguf|quants) is a GGUF model, whose files hold language alone"):
            open_encoder(model)
    with pytest.raises(OptionError, match=r"--load-format gguf reads the language part; .* auto, hf, safetensors, pt"):
        open_encoder(llava, load_format="gguf")
    with pytest.raises(OptionError, match="--load-format remote needs an address"):
        open_encoder(llava, load_format="remote")


# --- the hub, addresses -----------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"never asked for" for path in folder.iterdir()}


def test_from_the_hub_files_of_the_encoder_alone_are_fetched(llava: Path, hub: Hub) -> None:
    hub.add("acme/seeing", contents(llava))
    assert_same(dict(open_encoder("acme/seeing").items()), LLAVA_ENCODER)
    assert hub.fetched() == ["config.json", INDEX, "projector.safetensors", "tower.safetensors"]
    hub.requests.clear()
    assert set(open_encoder("acme/seeing@main")) == set(LLAVA_ENCODER)
    assert hub.requests == []  # what is there is whole


def test_of_a_text_model_on_the_hub_no_weights_are_fetched(hub: Hub, tiny_folder: Callable[[TinyModel], Path]) -> None:
    hub.add("acme/text", contents(tiny_folder(TinyModel(layers=1, files=1))))
    for _ in range(2):
        with pytest.raises(OptionError, match="is a text model"):
            open_encoder("acme/text")
    assert "model.safetensors" not in hub.fetched()


def test_of_a_split_repository_without_an_encoder_no_weights_are_fetched(tmp_path: Path, hub: Hub) -> None:
    folder = write(tmp_path / "blind", LLAVA, {"a.safetensors": LLAVA_TEXT})
    hub.add("acme/blind", contents(folder))
    with pytest.raises(CheckpointError, match="places no tensor of the model's encoder part"):
        open_encoder("acme/blind")
    assert hub.fetched() == ["config.json", INDEX]


def test_from_an_address_the_language_file_is_not_asked_for(
    llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLAYER_CACHE", str(tmp_path / "small"))
    with serving(llava) as server:
        weights = open_encoder(server.url)
        assert_same(dict(weights.items()), LLAVA_ENCODER)
        assert weights.bytes_read == nbytes_of(LLAVA_ENCODER)
        assert server.asked("language.safetensors") == 0
        (llava / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
        with pytest.raises(OptionError, match="is a text model"):
            open_encoder(server.url)


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_listing_has_name_dtype_shape_file_and_bytes(llava: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(llava), "--part", "encoder"]) == 0
    lines = capfd.readouterr().out.splitlines()
    patch = "vision_tower.vision_model.embeddings.patch_embedding.weight"
    assert f"{patch} BF16 [4, 3, 2, 2] tower.safetensors 96 bytes" in lines
    assert lines[-2:] == [
        "encoder: 4 tensors, 188 B, in 2 files",
        "language.safetensors: not opened, its 3 tensors are of the language part",
    ]
    assert len(lines) == 6


def test_the_listing_as_json_adds_up(llava: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(llava), "--part", "encoder", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["bytes"] == sum(tensor["bytes"] for tensor in found["tensors"]) == nbytes_of(LLAVA_ENCODER)
    (newline,) = [tensor for tensor in found["tensors"] if tensor["name"] == "image_newline"]
    assert newline == {
        "name": "image_newline", "shape": [6], "dtype": "F32", "bytes": 24,
        "file": str(llava / "projector.safetensors"),
    }  # fmt: skip
    assert found["unopened"] == [{"name": str(llava / "language.safetensors"), "tensors": 3}]


def test_from_the_hub_the_listing_fetches_files_of_the_encoder_alone(
    llava: Path, hub: Hub, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add("acme/seeing", contents(llava))
    assert run(["inspect", "acme/seeing", "--part", "encoder", "--json"]) == 0
    assert len(json.loads(capfd.readouterr().out)["tensors"]) == 4
    assert "language.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--quantization", "int8_per_channel"], "--quantization"), (["--source", "more"], "--source"),
        (["--layer", "0"], "--layer"), (["--files"], "--files"), (["--memory", "1GiB"], "--memory"),
    ],
)  # fmt: skip
def test_options_of_the_language_part_are_refused(
    given: list[str], named: str, llava: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(llava), "--part", "encoder", *given]) == 2
    words = f"{named} does not go with --part encoder, which takes --load-format, --revision, --remote-cache"
    assert words in capfd.readouterr().err


def test_the_language_part_is_what_is_listed_by_itself(
    tiny_folder: Callable[[TinyModel], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_folder(TinyModel(layers=1, files=1)))
    assert run(["inspect", folder]) == 0
    usual = capfd.readouterr().out
    assert run(["inspect", folder, "--part", "language"]) == 0
    assert capfd.readouterr().out == usual
    with pytest.raises(SystemExit, match="2"):
        run(["inspect", folder, "--part", "ears"])
    assert "choose from 'language', 'encoder'" in capfd.readouterr().err
