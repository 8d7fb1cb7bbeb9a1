"""Scales that a checkpoint holds for an fp8 KV cache: used by one, dropped by others, refused where they are none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from layers.batch import make_batch
from layers.context import StepContext
from layers.kv_cache import KVCache
from quant.dtypes import DType
from quant.kernels import Kernels
from streaming import LLM, CheckpointError, LoadOptions, cli
from streaming.kv_scales import NEEDLESS, USED
from streaming.leftovers import CACHE_SCALE
from streaming.prepare import prepare
from tests.streaming.resident import resident_model, same_bits

IDS = [5, 9, 7, 3, 150, 2, 8]
SCALES = {
    "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.03),
    "model.layers.0.self_attn.v_proj.v_scale": torch.tensor([0.5], dtype=torch.bfloat16),
    "model.layers.1.self_attn.kv_scale": torch.tensor([0.25], dtype=torch.float16),
}
WANTED = (pytest.approx(0.03), 0.5), (0.25, 0.25), (1.0, 1.0)


@pytest.fixture
def with_scales(tmp_path: Path, tiny_folder: Callable[[TinyModel], Path]) -> Callable[..., Path]:
    """A llama of three layers whose checkpoint holds some more tensors."""
    plain = tiny_folder(TinyModel(layers=3, files=1, dtype="float32"))

    def write(**more: torch.Tensor) -> Path:
        (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
        save_file(load_file(plain / "model.safetensors") | more, tmp_path / "model.safetensors")
        return tmp_path

    return write


def scales_of(folder: Path) -> tuple[tuple[float, float], ...] | None:
    return prepare(str(folder), LoadOptions(kv_cache_dtype="fp8")).kv_scales


def test_an_fp8_cache_takes_the_scales_of_the_checkpoint(with_scales: Callable[..., Path]) -> None:
    folder = with_scales(**SCALES)
    prepared = prepare(str(folder), LoadOptions(kv_cache_dtype="fp8_e4m3"))
    assert prepared.kv_scales == WANTED
    assert prepared.plan.dropped == dict.fromkeys(SCALES, USED)
    assert prepared.plan.unused == {USED: 4 + 2 + 2}


def test_its_logits_are_those_of_a_cache_that_is_given_them(with_scales: Callable[..., Path]) -> None:
    folder = with_scales(**SCALES)
    (folder / "plain").mkdir()
    (folder / "plain" / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = {n: t for n, t in load_file(folder / "model.safetensors").items() if n not in SCALES}
    save_file(weights, folder / "plain" / "model.safetensors")
    model = resident_model(folder / "plain", dtype="float32")
    scales = [(torch.tensor(0.03).item(), 0.5), (0.25, 0.25), (1.0, 1.0)]
    with torch.inference_mode():
        cache = KVCache(model.config, max_tokens=7, dtype=DType.F32, cache_dtype="fp8", scales=scales)
        expected = model(make_batch([(IDS, cache)], vocab_size=160), StepContext(Kernels.detect()))
    with LLM(folder, kv_cache_dtype="fp8") as llm:
        assert same_bits(llm.logits(IDS), expected)
    with LLM(folder / "plain", kv_cache_dtype="fp8") as llm:
        assert not same_bits(llm.logits(IDS), expected)


def test_a_cache_of_another_kind_drops_them_and_says_why(with_scales: Callable[..., Path]) -> None:
    folder = with_scales(**SCALES)
    for name, reason in (("auto", CACHE_SCALE), ("int8", NEEDLESS), ("int4", NEEDLESS)):
        prepared = prepare(str(folder), LoadOptions(kv_cache_dtype=name))
        assert prepared.kv_scales is None
        assert prepared.plan.unused == {reason: 8}


def test_without_scales_all_are_one(with_scales: Callable[..., Path]) -> None:
    assert scales_of(with_scales()) is None
    layer = {"model.layers.2.self_attn.attn.v_scale": torch.tensor(2.0)}
    assert scales_of(with_scales(**layer)) == ((1.0, 1.0), (1.0, 1.0), (1.0, 2.0))


def test_one_of_its_own_goes_before_one_for_both_and_equal_ones_agree(with_scales: Callable[..., Path]) -> None:
    names = {"kv_scale": 4.0, "k_scale": 2.0, "k_proj.output_scale": 2.0}
    tensors = {f"model.layers.0.self_attn.{name}": torch.tensor(value) for name, value in names.items()}
    found = scales_of(with_scales(**tensors))
    assert found is not None
    assert found[0] == (2.0, 4.0)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"k_scale": torch.tensor(0.0)}, r"k_scale is 0: a KV-cache scale is a number from 1e-30 to 1e\+30"),
        ({"k_scale": torch.tensor(-1.0)}, "k_scale is -1: "),
        ({"k_scale": torch.tensor(float("nan"))}, "k_scale is nan: "),
        ({"k_scale": torch.ones(2)}, r"k_scale: \[2\] F32; a KV-cache scale is one floating-point number"),
        ({"k_scale": torch.ones(100_000)}, r"k_scale: \[100000\] F32; a KV-cache scale is one"),
        ({"k_scale": torch.ones(1, dtype=torch.int32)}, r"k_scale: \[1\] I32; "),
        (
            {"k_scale": torch.tensor(2.0), "k_proj.k_scale": torch.tensor(3.0)},
            "both scale the same part of the KV cache",
        ),
    ],
)
def test_what_is_no_scale_is_one_clear_line_and_only_for_an_fp8_cache(
    tensors: dict[str, torch.Tensor], words: str, with_scales: Callable[..., Path]
) -> None:
    folder = with_scales(**{f"model.layers.0.self_attn.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError, match=words) as caught:
        scales_of(folder)
    assert "\n" not in str(caught.value)
    assert prepare(str(folder), LoadOptions(kv_cache_dtype="int8")).kv_scales is None


def test_shards_hold_them(with_scales: Callable[..., Path], tmp_path: Path) -> None:
    folder, out = with_scales(**SCALES), tmp_path / "shards"
    assert cli.run(["save-shards", str(folder), "--out", str(out), "--quiet"]) == 0
    assert scales_of(out) == scales_of(folder)
    assert prepare(str(out), LoadOptions(kv_cache_dtype="int8")).kv_scales is None


@pytest.mark.parametrize(
    "option", [("--kv-cache-dtype", "int8"), ("--activation-dtype", "int8"), ("--kernels", "fast")]
)
def test_shards_hold_weights_and_refuse_what_would_not_be_in_them(
    option: tuple[str, str], with_scales: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "shards"
    assert cli.run(["save-shards", str(with_scales()), "--out", str(out), *option]) == 2
    assert f"{option[0]} {option[1]}: save-shards writes weights" in capfd.readouterr().err
    assert not out.exists()


def test_scales_that_cannot_be_used_are_refused_where_the_shards_are_loaded_with_such_a_cache(
    with_scales: Callable[..., Path], tmp_path: Path
) -> None:
    folder, out = with_scales(**{"model.layers.0.self_attn.k_scale": torch.ones(4)}), tmp_path / "shards"
    assert cli.run(["save-shards", str(folder), "--out", str(out), "--quiet"]) == 0
    assert prepare(str(out), LoadOptions()).warnings == ()
    with pytest.raises(CheckpointError, match=r"self_attn.k_scale: \[4\] F32; a KV-cache scale is one"):
        scales_of(out)
