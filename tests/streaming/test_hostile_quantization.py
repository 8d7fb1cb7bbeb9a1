"""Quantized checkpoints whose configuration or numbers cannot be right: each is found, and told in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from quant.disk_forms.bitsandbytes import FourBits
from quant.dtypes import DType
from quant.nf4 import Nf4
from streaming import LLM, LoadOptions
from streaming.checkpoint.tensors import TensorInfo
from streaming.disk_matching import coded_problem
from streaming.errors import CheckpointError, LayerLoadError, MissingTensorError, TensorMismatchError
from streaming.hooks import Hooks
from streaming.prepare import prepare
from tests.quant.compressed import Encoded, args, config, float4, integers
from tests.streaming.coded import Encode, Tensors, write_coded

O_PROJ = "model.layers.0.self_attn.o_proj"
FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
MXFP8: dict[str, Any] = {"quant_method": "mxfp8"}
INT4 = args(4, "int", "group", group_size=32)


def fp8(module: str, weight: torch.Tensor) -> Encoded:
    codes = (weight.float() * 100).to(torch.float8_e4m3fn)
    scale = torch.full((-(-weight.shape[0] // 32), -(-weight.shape[1] // 32)), 0.01)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * 0.01


def mxfp8(module: str, weight: torch.Tensor) -> Encoded:
    codes = (weight.float() * 128).to(torch.float8_e4m3fn)
    scale = torch.full((weight.shape[0], -(-weight.shape[1] // 32)), 127 - 7, dtype=torch.uint8)
    return {"weight": codes, "weight_scale": scale}, codes.float() / 128


def mxfp4(module: str, weight: torch.Tensor) -> Encoded:
    return float4(weight, block=32)


def nvfp4(module: str, weight: torch.Tensor) -> Encoded:
    return float4(weight, block=16, divisor=300.0)


def int4(module: str, weight: torch.Tensor) -> Encoded:
    return integers(weight, bits=4, size=32)


def int4_bytes(module: str, weight: torch.Tensor) -> Encoded:
    return integers(weight, bits=4, size=32, symmetric=False, as_words=False)


FORMS: dict[str, tuple[Encode, dict[str, Any]]] = {
    "fp8": (fp8, FP8),
    "mxfp8": (mxfp8, MXFP8),
    "mxfp4": (mxfp4, config(args(4, "float", "group", group_size=32))),
    "nvfp4": (nvfp4, config(args(4, "float", "tensor_group", group_size=16))),
    "int4": (int4, config(INT4)),
    "int4_ordered": (int4, config(INT4 | {"actorder": "group"})),
    "int4_bytes": (int4_bytes, config(INT4 | {"symmetric": False})),
}


def written(folder: Path, form: str, change: Callable[[Tensors], None] | None = None) -> str:
    encode, quantization = FORMS[form]
    coded, _ = write_coded(folder, encode, config=quantization, model=TinyModel(layers=1))
    tensors = load_file(coded / "model.safetensors")
    if change is not None:
        change(tensors)
    save_file(tensors, coded / "model.safetensors")
    return str(coded)


def reconfigured(folder: str, quantization: object) -> str:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return folder


def byte(leaf: str, code: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{O_PROJ}.{leaf}"].view(torch.uint8)[-1, -1] = code

    return change


@pytest.mark.parametrize(
    ("form", "leaf", "code"),
    [
        ("fp8", "weight", 0x7F),
        ("fp8", "weight", 0xFF),
        ("mxfp8", "weight_scale", 0xFF),
        ("mxfp8", "weight", 0xFF),
        ("mxfp4", "weight_scale", 0xFF),
        ("nvfp4", "weight_scale", 0x7F),
    ],
)
def test_a_code_that_is_no_number_is_a_warning_or_an_error(tmp_path: Path, form: str, leaf: str, code: int) -> None:
    folder = written(tmp_path, form, byte(leaf, code))
    told: list[str] = []
    with LLM(folder, hooks=Hooks(warn=told.append)) as llm:
        llm.wait_loaded()
    assert told == [f"{O_PROJ}.{leaf} in model.safetensors holds NaN"]
    words = rf"{O_PROJ}\.{leaf} in model\.safetensors holds NaN"
    with pytest.raises(LayerLoadError, match=words), LLM(folder, check_weights=True) as llm:
        llm.wait_loaded()


@pytest.mark.parametrize("form", ["fp8", "mxfp8", "mxfp4", "nvfp4"])
def test_codes_that_are_numbers_are_not_complained_of(tmp_path: Path, form: str) -> None:
    def extreme(tensors: Tensors) -> None:
        if form == "mxfp8":
            tensors[f"{O_PROJ}.weight_scale"].fill_(0)  # a power of two, not zero
        if form.endswith("fp8"):
            tensors[f"{O_PROJ}.weight"].view(torch.uint8)[0, :3] = torch.tensor([0x7E, 0xFE, 0x80])

    with LLM(written(tmp_path, form, extreme), check_weights=True) as llm:
        llm.wait_loaded()
        assert llm.stats().warnings == ()


def test_fp8_codes_of_nothing_but_zeros_are_a_broken_download(tmp_path: Path) -> None:
    def blank(tensors: Tensors) -> None:
        tensors[f"{O_PROJ}.weight"].view(torch.uint8).zero_()

    with LLM(written(tmp_path, "fp8", blank)) as llm:
        llm.wait_loaded()
        (told,) = llm.stats().warnings
    assert told == f"{O_PROJ}.weight in model.safetensors holds only zeros: is the download complete?"


def add_wide(tensors: Tensors) -> None:
    tensors[f"{O_PROJ}.weight"] = torch.ones(64, 64)


def test_a_weight_that_is_there_in_two_forms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TensorMismatchError, match=f"{O_PROJ}: weight and weight_packed are both there"):
        prepare(written(tmp_path, "int4", add_wide), LoadOptions())


def test_groups_of_ordered_inputs_without_their_order_are_refused(tmp_path: Path) -> None:
    with pytest.raises((TensorMismatchError, MissingTensorError), match=rf"{O_PROJ}: .*\(actorder\).* weight_g_idx"):
        prepare(written(tmp_path, "int4_ordered"), LoadOptions())


@pytest.mark.parametrize(("leaf", "code"), [("weight", 8), ("weight", -9), ("weight_zero_point", 100)])
def test_codes_that_their_bits_cannot_hold_are_refused(tmp_path: Path, leaf: str, code: int) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{O_PROJ}.{leaf}"][0, 0] = code

    folder = written(tmp_path, "int4_bytes", change)
    with pytest.raises(LayerLoadError, match=rf"{O_PROJ}\.{leaf}.* {code}.* -8 to 7"), LLM(folder) as llm:
        llm.wait_loaded()


def test_a_state_that_is_too_long_is_told_in_one_short_line(tmp_path: Path) -> None:
    """Its text may have any length up to a limit: not all of them are listed."""
    form = FourBits(Nf4("nf4", 64))
    wanted = next(one for one in form.tensors(64, 64) if "quant_state" in one.leaf)
    info = TensorInfo("a.quant_state", (9999,), DType.U8, tmp_path / "model.safetensors", 0, 9999)
    problem = coded_problem(info, wanted, form)
    assert problem is not None
    assert problem.startswith("a.quant_state in model.safetensors: shape [9999], but bitsandbytes nf4")
    assert problem.endswith("makes it one of [1] to [4095]")


@pytest.mark.parametrize(
    "quantization",
    [
        {**FP8, "modules_to_not_convert": ["re:(a+)+$"]},
        {**FP8, "ignored_layers": ["re:("]},
        {**FP8, "ignored_layers": [f"re:a*b*c*d*{number}" for number in range(100)]},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "A" * 100_000},
        *({"quant_method": method, "bits": 4, "group_size": 1 << 63} for method in ("awq", "gptq")),
        {**FP8, "weight_block_size": [1 << 63, 1 << 63]},
        config(args(8, "float", "block", block_structure=[1, 1 << 63])),
        config(INT4 | {"group_size": 10**30}),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "pack_dtype": "int32" * 10_000},
        config(INT4, ignore=[f"re:model.{number}" for number in range(5000)]),
        config(INT4) | {"config_groups": {
            f"{number}": {"targets": [f"re:.*x.*y.*{number}"], "weights": INT4} for number in range(1000)
        }},
    ],
)  # fmt: skip
@pytest.mark.parametrize("scheme", ["none", "fp8_per_channel"])
def test_a_setting_that_cannot_be_used_is_refused_in_one_line_before_any_module_is_looked_for(
    tmp_path: Path, quantization: dict[str, Any], scheme: str
) -> None:
    folder = reconfigured(written(tmp_path, "fp8"), quantization)
    with pytest.raises(CheckpointError) as caught:
        prepare(folder, LoadOptions(quantization=scheme))
    assert str(caught.value).startswith(f"{folder}: config.json: quantization_config: ")
    assert len(str(caught.value).removeprefix(folder)) < 400
    assert "\n" not in str(caught.value)
