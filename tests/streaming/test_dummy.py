"""Made-up weights: nothing but config.json is read, any run of rows is the whole's, and the model computes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from examples.write_tiny_model import TinyModel, config_of
from quant.dtypes import DType, to_torch
from streaming import cli
from streaming.commands.resident_dummy import _random_numbers, whole_tensor
from streaming.dummy import open_dummy, reseeded
from streaming.dummy_pattern import BLOCK_VALUES, pattern_block, read_pattern
from streaming.llm import LLM
from streaming.options import LoadOptions
from streaming.prepare import prepare
from tests.layers.tiny import ARCHITECTURES, raw_config
from tests.streaming.resident import same_bits

IDS = [3, 1, 4, 1, 5]


def config_folder(folder: Path, model: TinyModel = TinyModel()) -> Path:  # noqa: B008 (frozen)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(model)))
    return folder


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32, DType.F64])
def test_numbers_are_small_and_of_both_signs(dtype: DType) -> None:
    numbers = torch.frombuffer(bytearray(pattern_block(f"random.{dtype.value}")), dtype=to_torch(dtype)).double()
    assert len(numbers) == BLOCK_VALUES
    assert numbers.abs().min() >= 2**-7
    assert numbers.abs().max() < 2**-5
    assert abs(numbers.mean()) < 1e-4  # 0.02 / sqrt(524287) is 3e-5
    assert len(numbers.unique()) > {DType.BF16: 500, DType.F16: 4000}.get(dtype, 500_000)
    ones = torch.frombuffer(bytearray(pattern_block(f"ones.{dtype.value}")), dtype=to_torch(dtype))
    assert torch.equal(ones, torch.ones_like(ones))


def test_rows_made_alone_are_the_rows_of_the_whole(tmp_path: Path) -> None:
    checkpoint = reseeded(open_dummy(config_folder(tmp_path, TinyModel(hidden_size=96, vocab_size=8000))), seed=5)
    info = checkpoint.tensors["lm_head.weight"]
    whole = whole_tensor(info, _random_numbers(info), seed=5)  # longer than the block that repeats
    assert whole.numel() > BLOCK_VALUES
    block, chance = pattern_block(info.file.name), random.Random(0)
    for _ in range(50):
        first = chance.randrange(info.shape[0])
        stop = chance.randrange(first, info.shape[0]) + 1
        raw = bytearray((stop - first) * info.row_nbytes)
        read_pattern(block, memoryview(raw), info.offset + first * info.row_nbytes)
        assert same_bits(torch.frombuffer(raw, dtype=torch.bfloat16).view(-1, 96), whole[first:stop])
    assert len(whole.unique(dim=0)) == info.shape[0]  # no two rows are equal


@pytest.mark.parametrize("quantization", ["none", "fp8_per_block", "int8_per_channel"])
def test_streamed_equals_resident(tmp_path: Path, quantization: str) -> None:
    folder = config_folder(tmp_path)
    common = ["--load-format", "dummy", "--quantization", quantization, "--seed", "3", "--quiet"]
    assert cli.run(["verify", str(folder), *common]) == 0
    assert cli.run(["verify", str(folder), *common, "--reader", "threads"]) == 0
    assert cli.run(["verify", str(folder / "config.json"), *common, "--dtype", "float32"]) == 0


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_every_family_computes_finite_logits_and_no_byte_is_read(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config(family)))
    with LLM(tmp_path, load_format="dummy") as llm:
        assert llm.logits(IDS).isfinite().all()
        llm.wait_loaded()
        summary = llm.stats()
    assert (summary.bytes_read, summary.load_format) == (0, "dummy")
    assert summary.bytes_kept > 0


def test_the_seed_decides(tmp_path: Path) -> None:
    def logits(seed: int | None) -> torch.Tensor:
        with LLM(config_folder(tmp_path), load_format="dummy", seed=seed) as llm:
            found: torch.Tensor = llm.logits(IDS)
            return found

    assert same_bits(logits(7), logits(7))
    assert same_bits(logits(None), logits(0))
    assert not torch.equal(logits(7), logits(8))


def test_plan_and_generate_say_that_it_is_made_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = config_folder(tmp_path)
    assert cli.run(["plan", str(folder), "--load-format", "dummy", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["format"], plan["bytes_read"], plan["estimate_s"]) == ("dummy", 0, {"500000000": 0.0, "3000000000": 0})
    assert plan["bytes_kept"] > 0
    assert cli.run(["generate", str(folder), "--load-format", "dummy", "--ids", "1,2", "--max-tokens", "1"]) == 0
    shown = capfd.readouterr().err
    assert "format dummy: the weights are made up" in shown
    assert "0 B read (dummy" in shown


def test_bench_has_no_floor_to_hold_it_against(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = config_folder(tmp_path)
    assert cli.run(["bench", str(folder), "--load-format", "dummy", "--once", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["bytes_read"] == 0


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "glm4", "stablelm"])
def test_what_was_made_up_can_be_saved_and_loaded_again(tmp_path: Path, family: str) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw_config(family)))
    common = ["--quantization", "fp8_per_tensor", "--quiet"]
    assert cli.run(["save-shards", str(folder), "--load-format", "dummy", "--out", str(out), *common]) == 0
    with LLM(folder, load_format="dummy", quantization="fp8_per_tensor") as dummy, LLM(out) as saved:
        assert same_bits(dummy.logits(IDS), saved.logits(IDS))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"safetensors_load_strategy": "direct"}, "--safetensors-load-strategy direct: format dummy reads no files"),
        ({"model_loader_extra_config": '{"num_threads": 2}'}, "model-loader-extra-config .*: format dummy reads no"),
        ({"unwrap_names": True}, "--unwrap-names: format dummy reads no files"),
        ({"seed": -1}, "--seed -1"),
        ({"seed": True}, "--seed True"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(Exception, match=words):
        prepare(str(config_folder(tmp_path)), LoadOptions(load_format="dummy", **options))  # type: ignore[arg-type]


def test_what_is_no_config_is_refused(tmp_path: Path, four_layers: Path) -> None:
    with pytest.raises(Exception, match="does not exist"):
        open_dummy(tmp_path)
    file = next(four_layers.glob("*.safetensors"))
    with pytest.raises(Exception, match=r"takes a model's config\.json"):
        open_dummy(file)
