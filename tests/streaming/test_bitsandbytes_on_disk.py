"""bitsandbytes' checkpoints: nf4, fp4 and int8 by a literal reading, and against the library where it is installed."""

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
from quant.disk_forms.form import fill
from quant.dtypes import DType, to_torch
from quant.errors import QuantError
from quant.kernels import Kernels
from quant.nf4 import Nf4
from streaming import LLM, LoadOptions, cli
from streaming.errors import CheckpointError, LayerLoadError
from streaming.prepare import prepare
from tests.streaming.coded import Encode, Tensors, logits_of, write_coded
from tests.streaming.resident import same_bits

IDS = [5, 9, 7, 21]
# QLoRA, appendix E; and fp4 as bitsandbytes' documentation of its codes lists it, over 12.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]
TABLES = {"nf4": torch.tensor(NF4), "fp4": torch.tensor(FP4) / 12}
FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}
EIGHT_BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}


def four_bits(
    kind: str = "nf4", *, block: int = 64, nested: bool = False
) -> Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]:
    """Random codes and scales, and what they stand for by the letter of the format."""

    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numel = weight.numel()
        codes = torch.randint(0, 16, (numel,), dtype=torch.uint8)
        packed = (codes[0::2] << 4 | codes[1::2]).unsqueeze(1)
        blocks = -(-numel // block)
        state: dict[str, Any] = {
            "quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape),
        }  # fmt: skip
        tensors = {"weight": packed, "weight.quant_map": TABLES[kind].clone()}
        absmax = torch.rand(blocks).add_(0.2).mul_(0.1)
        if nested:
            scale_codes = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
            scale_map, outer = torch.rand(256).sub_(0.5), torch.rand(-(-blocks // 256)) * 0.1
            offset = 0.0731234
            absmax = scale_map[scale_codes.long()] * outer.repeat_interleave(256)[:blocks] + offset
            tensors |= {
                "weight.absmax": scale_codes, "weight.nested_absmax": outer, "weight.nested_quant_map": scale_map,
            }  # fmt: skip
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        else:
            tensors["weight.absmax"] = absmax
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = as_bytes(state)
        wide = TABLES[kind][codes.long()] * absmax.repeat_interleave(block)[:numel]
        return tensors, wide.view(weight.shape)

    return encode


def as_bytes(state: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def eight_bits(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scb = weight.float().abs().amax(1)
    codes = (weight.float() * (127 / scb).unsqueeze(1)).round().to(torch.int8)
    wide = codes.float() * (scb / 127).unsqueeze(1)
    return {"weight": codes, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}, wide


FORMS = {
    "nf4": four_bits(), "nf4 nested": four_bits(nested=True), "fp4 nested": four_bits("fp4", nested=True),
    "nf4 in blocks of 128": four_bits(block=128), "one block": four_bits(block=4096, nested=True),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("family", "width"), [("llama", 64), ("phi3", 72)])  # 72: blocks reach over the end of rows
def test_logits_are_those_of_the_numbers_that_the_codes_stand_for(
    tmp_path: Path, form: str, family: str, width: int
) -> None:
    model = TinyModel(layers=1, family=family, hidden_size=width, heads=2, kv_heads=1, head_dim=width // 2)
    coded, twin = write_coded(tmp_path, FORMS[form], config=FOUR_BITS, model=model)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [64, 72])
def test_what_is_kept_stands_for_the_same_numbers_to_the_bit(tmp_path: Path, form: str, width: int) -> None:
    model = TinyModel(layers=1, hidden_size=width, heads=2, kv_heads=1, head_dim=width // 2, intermediate_size=50)
    coded, twin = write_coded(tmp_path, FORMS[form], config=FOUR_BITS, model=model)
    on_disk, wide = load_file(coded / "model.safetensors"), load_file(twin / "model.safetensors")
    modules = [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up")]
    param = {p.name: p for s in prepare(str(coded), LoadOptions()).specs for p in s.params}[
        "model.layers.0.mlp.gate_up_proj.weight"
    ]
    with LLM(str(coded)) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters()) | dict(llm.shell.named_buffers())
        stored = {leaf: kept[f"model.layers.0.mlp.gate_up_proj.{leaf}"].detach().clone() for leaf in param.storage()}
    packed = torch.cat([on_disk[f"{module}.weight"].view(50, -1) for module in modules])
    assert same_bits(stored["weight"], packed)
    found = param.scheme.dequantize(stored, param.kept_rows, dtype=torch.float32)
    assert torch.equal(found, torch.cat([wide[f"{module}.weight"] for module in modules]))


def test_int8_is_kept_as_it_is(tmp_path: Path) -> None:
    coded, twin = write_coded(tmp_path, eight_bits, config=EIGHT_BITS, model=TinyModel(layers=1))
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)
    prepared = prepare(str(coded), LoadOptions())
    params = [param for spec in prepared.specs for param in spec.params]
    assert {param.scheme.name for param in params if "proj" in param.name} == {"int8_per_channel"}
    assert "how codes lie in memory" in prepared.plan.dropped["model.layers.0.mlp.up_proj.weight_format"]


@pytest.mark.parametrize("encode", [four_bits(nested=True), eight_bits], ids=["nf4", "int8"])
def test_verify_finds_the_streamed_model_equal_to_the_resident_one(
    tmp_path: Path, encode: Encode, capfd: pytest.CaptureFixture[str]
) -> None:
    coded, _ = write_coded(tmp_path, encode, config=FOUR_BITS, model=TinyModel(layers=1))
    assert cli.run(["verify", str(coded)]) == 0, capfd.readouterr().err
    assert "equal to the bit" in capfd.readouterr().out


def test_a_part_that_stays_wide_makes_its_fused_weight_wide(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        return None if module.endswith("v_proj") else four_bits(nested=True)(module, weight)

    model = TinyModel(layers=1, hidden_size=72, heads=2, kv_heads=1, head_dim=36)
    coded, twin = write_coded(tmp_path, encode, config=FOUR_BITS, model=model)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)


def test_it_is_not_quantized_another_way(tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, four_bits(), config=FOUR_BITS, model=TinyModel(layers=1))
    with pytest.raises(CheckpointError, match=r"already quantized on disk \(bitsandbytes nf4 in blocks of 64\)"):
        prepare(str(coded), LoadOptions(quantization="int8_per_channel"))


@pytest.mark.parametrize(("columns", "block"), [(64, 64), (96, 64), (40, 64), (1030, 128), (10, 4096)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_products_equal_those_with_the_wide_weight(columns: int, block: int, tokens: int) -> None:
    rows = (130, 67)
    scheme = Nf4.of("nf4", block=block, in_features=columns)
    stored = {
        n: torch.empty(s.shape, dtype=to_torch(s.dtype))
        for n, s in scheme.storage(rows, columns, wide=DType.BF16).items()
    }
    wide = []
    for index, count in enumerate(rows):
        tensors, numbers = four_bits(block=block)("", torch.empty(count, columns))
        plain = {leaf.replace(".", "_").replace("bitsandbytes__", ""): one for leaf, one in tensors.items()}
        views = scheme.section_views(stored, rows, index)
        fill(FourBits(scheme), plain, views, shape=(count, columns))
        wide.append(numbers)
    assert torch.equal(scheme.dequantize(stored, rows, dtype=torch.float32), torch.cat(wide))
    x, bias = torch.randn(tokens, columns), torch.randn(sum(rows))
    found = scheme.linear(x, stored, rows, bias, kernels=Kernels())
    torch.testing.assert_close(found, x @ torch.cat(wide).t() + bias, rtol=1e-5, atol=1e-4)


def test_an_odd_number_of_columns_is_refused() -> None:
    with pytest.raises(QuantError, match="even number of columns, not 7"):
        Nf4.of("nf4", block=64, in_features=7)


@pytest.mark.parametrize("fields", [("nf5", 64, 1), ("nf4", 0, 1), ("nf4", 64, 0), ("nf4", 64, 2)])
def test_a_scheme_that_cannot_be_is_refused(fields: tuple[str, int, int]) -> None:
    with pytest.raises(QuantError, match=r"are not known|are not whole blocks"):
        Nf4(*fields).storage((8,), 16, wide=DType.BF16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_type": "fp4"}, "quant_state says quant_type fp4, not nf4"),
        ({"shape": [1, 2]}, r"quant_state says shape \[1, 2\]"),
        ({"blocksize": 128}, "quant_state says blocksize 128, but its scales are for 64"),
        ({"nested_offset": "0"}, "quant_state says nested_offset 0, not a number"),
        ({"nested_offset": 1e999}, "quant_state says nested_offset inf, not a number"),
        (None, "quant_state is no JSON object"),
    ],
)
def test_a_state_that_contradicts_the_shapes_is_found_while_loading(
    tmp_path: Path, change: dict[str, object] | None, words: str
) -> None:
    coded, _ = write_coded(tmp_path, four_bits(nested=True), config=FOUR_BITS, model=TinyModel(layers=1))
    tensors = load_file(coded / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist()))
    changed = as_bytes(state | change) if change is not None else as_bytes([1])
    save_file(tensors | {name: changed}, coded / "model.safetensors")
    with pytest.raises(LayerLoadError, match=words), LLM(str(coded)) as llm:
        llm.wait_loaded()


def test_codes_for_other_numbers_are_refused(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, wide = four_bits()(module, weight)
        tensors["weight.quant_map"] += 0.5
        return tensors, wide

    coded, _ = write_coded(tmp_path, encode, config=FOUR_BITS, model=TinyModel(layers=1))
    with pytest.raises(LayerLoadError, match=r"its weight\.quant_map has other numbers"), LLM(str(coded)) as llm:
        llm.wait_loaded()


def test_all_faults_that_headers_show_come_in_one_report(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, wide = four_bits(nested=True)(module, weight)
        last = module.rpartition(".")[2]
        if last == "q_proj":
            del tensors["weight.quant_state.bitsandbytes__nf4"]
        if last == "k_proj":
            tensors["weight.absmax"] = tensors["weight.absmax"][:-1]
        if last == "o_proj":
            tensors["weight"] = tensors["weight"][:-1]
        if last == "v_proj":
            tensors["weight"] = torch.zeros(1024, 1, dtype=torch.bfloat16)  # as many bytes
        if last == "gate_proj":
            del tensors["weight.nested_absmax"]
        if last == "up_proj":
            tensors["weight.nested_quant_map"] = torch.ones(255)
        return tensors, wide

    coded, _ = write_coded(tmp_path, encode, config=FOUR_BITS, model=TinyModel(layers=1))
    with pytest.raises(CheckpointError) as raised:
        prepare(str(coded), LoadOptions())
    message = str(raised.value)
    assert "q_proj: its weight is U8, but it has no weight.quant_state.bitsandbytes__nf4" in message
    assert "k_proj: 31 scales (weight.absmax) are none for blocks of 32 to 4096 of 2048 numbers" in message
    assert "v_proj: its 4-bit codes are stored as BF16 (bnb_4bit_quant_storage)" in message
    assert "o_proj: weight has shape [2047, 1], but 4096 codes are [2048, 1]" in message
    assert "gate_proj: its scales (weight.absmax) are U8, but it has no weight.nested_absmax" in message
    assert "up_proj.weight.nested_quant_map in model.safetensors: shape [255]" in message


def test_codes_without_any_configuration_are_one_line_that_names_it(tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, four_bits(), config=FOUR_BITS, model=TinyModel(layers=1))
    raw = json.loads((coded / "config.json").read_text(encoding="utf-8"))
    del raw["quantization_config"]
    (coded / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(
        CheckpointError, match=r"is U8 with weight\.absmax and 6 more weights are so: the checkpoint is"
    ):
        prepare(str(coded), LoadOptions())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("columns", [64, 72])
def test_the_library_finds_the_same_numbers(kind: str, nested: bool, columns: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(96, columns)
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
    saved = {
        f"weight_{k.replace('bitsandbytes__', '').replace('.', '_')}": v for k, v in state.as_dict(packed=True).items()
    }
    scheme = Nf4.of(kind, block=64, in_features=columns)
    stored = {
        n: torch.empty(s.shape, dtype=to_torch(s.dtype))
        for n, s in scheme.storage((96,), columns, wide=DType.BF16).items()
    }
    fill(FourBits(scheme, 256 if nested else 0), {"weight": codes, **saved}, stored, shape=(96, columns))
    found = scheme.dequantize(stored, (96,), dtype=torch.float32)
    assert torch.equal(found, functional.dequantize_4bit(codes, state))
