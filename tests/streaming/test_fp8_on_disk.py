"""FP8 as checkpoints hold it: blocks of any size, scales in every dtype, one scale a part, MXFP8; what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from layers.context import StepContext
from layers.embedding import project
from quant.dtypes import DType, to_torch
from quant.float8 import Fp8PerBlock
from quant.kernels import Kernels
from quant.nf4 import Nf4
from quant.scheme import Scheme
from streaming import LLM, LoadOptions, cli
from streaming.errors import CheckpointError
from streaming.prepare import prepare
from tests.streaming.coded import Encode, Tensors, logits_of, write_coded
from tests.streaming.resident import same_bits

IDS = [5, 9, 7, 21]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def in_blocks(height: int, width: int, dtype: torch.dtype, leaf: str = "weight_scale_inv") -> Encode:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        grid = torch.rand(-(-rows // height), -(-columns // width)).add_(0.5).mul_(0.003).to(dtype)
        if dtype == torch.float8_e8m0fnu:
            grid = torch.randint(117, 120, grid.shape, dtype=torch.uint8).view(dtype)
        scale = grid.float().repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, leaf: grid}, codes.float() * scale

    return encode


BLOCKS = [
    (128, 128, torch.float32), (128, 128, torch.float16), (128, 128, torch.float8_e8m0fnu), (64, 64, torch.bfloat16),
    (1, 128, torch.float32), (1, 24, torch.bfloat16), (128, 1, torch.float32), (48, 20, torch.float8_e8m0fnu),
]  # fmt: skip


@pytest.mark.parametrize(("height", "width", "dtype"), BLOCKS)
def test_blocks_of_any_size_with_scales_of_any_dtype(
    tmp_path: Path, height: int, width: int, dtype: torch.dtype
) -> None:
    config = {**FP8, "weight_block_size": [height, width]}
    model = TinyModel(layers=1, family="phi3")  # projections are fused on disk, with part edges inside blocks
    coded, twin = write_coded(tmp_path, in_blocks(height, width, dtype), config=config, model=model)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)
    on_disk = load_file(coded / "model.safetensors")
    params = {param.name: param for spec in prepare(str(coded), LoadOptions()).specs for param in spec.params}
    qkv = params["model.layers.0.self_attn.qkv_proj.weight"]
    assert (qkv.scheme, qkv.kept_rows) == (Fp8PerBlock(block=(height, width)), (128,))  # one run, not q, k and v
    with LLM(str(coded)) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters()) | dict(llm.shell.named_buffers())
        stem = "model.layers.0.mlp.gate_up_proj.weight"
        assert same_bits(kept[stem], on_disk[stem])
        stored = {"weight": kept[stem].detach(), "weight_scale": kept[f"{stem}_scale"].detach()}
        wide = params[stem].scheme.dequantize(stored, params[stem].kept_rows, dtype=torch.float32)
        assert same_bits(wide, load_file(twin / "model.safetensors")[stem])


@pytest.mark.parametrize("block", [(64, 64), (1, 128), (100, 48), (7, 5), (128, 1), (4096, 4096)])
@pytest.mark.parametrize("tokens", [1, 40])
def test_products_with_other_blocks_equal_those_with_the_wide_weight(block: tuple[int, int], tokens: int) -> None:
    rows, columns = 300, 1030  # so that strips and panels begin inside blocks
    codes = torch.randn(rows, columns).mul_(40).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
    scheme, stored = Fp8PerBlock(block=block), {"weight": codes, "weight_scale": scale}
    row, column = torch.arange(rows) // block[0], torch.arange(columns) // block[1]
    wide = codes.float() * scale[row][:, column]
    assert same_bits(scheme.dequantize(stored, (rows,), dtype=torch.float32), wide)
    x = torch.randn(tokens, columns)
    found = scheme.linear(x, stored, (rows,), None, kernels=Kernels())
    torch.testing.assert_close(found, x @ wide.t(), rtol=1e-5, atol=5e-2)


@pytest.mark.parametrize("scheme", [Fp8PerBlock(block=(48, 20)), Nf4.of("nf4", block=64, in_features=40)])
def test_a_head_is_multiplied_in_chunks_of_whole_blocks(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layers.embedding.CHUNK_ROWS", 100)  # no multiple of 48, nor of the 8 rows that are 5 blocks
    rows, columns = 330, 40
    stored = {
        n: torch.ones(s.shape, dtype=to_torch(s.dtype))
        for n, s in scheme.storage((rows,), columns, wide=DType.BF16).items()
    }
    stored["weight"] = torch.randint(0, 100, stored["weight"].shape, dtype=torch.uint8).view(stored["weight"].dtype)
    stored["weight_scale"].uniform_()
    x = torch.randn(3, columns)
    found = project(x, stored, param="lm_head.weight", scheme=scheme, ctx=StepContext(kernels=Kernels()))
    wide = scheme.dequantize(stored, (rows,), dtype=torch.float32)
    torch.testing.assert_close(found, x @ wide.t(), rtol=1e-5, atol=1e-4)


def test_scales_of_the_parts_of_a_weight_that_is_fused_on_disk(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        parts = {"qkv_proj": (64, 32, 32), "gate_up_proj": (96, 96)}.get(module.rpartition(".")[2])
        if parts is None:
            return None
        scales = torch.arange(1, len(parts) + 1) * 0.003
        scale = scales.repeat_interleave(torch.tensor(parts)).unsqueeze(1)
        codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(len(parts))}, codes.float() * scale

    config = {**FP8, "activation_scheme": "static"}
    coded, twin = write_coded(tmp_path, encode, config=config, model=TinyModel(layers=1, family="phi3"))
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)
    dropped = prepare(str(coded), LoadOptions()).plan.dropped
    assert "quantized activations" in dropped["model.layers.0.self_attn.qkv_proj.input_scale"]


def test_fbgemm_has_a_scale_for_each_row_and_an_upper_bound_of_inputs(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if "down_proj" in module:
            return None
        scale = weight.float().abs().amax(1, keepdim=True) / 448
        codes = (weight.float() / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "input_scale_ub": torch.tensor([1200.0])}, codes.float() * scale

    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["down_proj"]}
    coded, twin = write_coded(tmp_path, encode, config=config, model=TinyModel(layers=1))
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)
    params = [p for spec in prepare(str(coded), LoadOptions(quantization="fp8_per_tensor")).specs for p in spec.params]
    assert {p.scheme.name for p in params if "down_proj" in p.name} == {"none"}


def as_mx(dtype: torch.dtype, leaf: str) -> Encode:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes = torch.randint(115, 122, (weight.shape[0], -(-weight.shape[1] // 32)), dtype=torch.uint8)
        scale = torch.exp2(codes.float() - 127).repeat_interleave(32, 1)[:, : weight.shape[1]]
        numbers = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": numbers, leaf: codes.view(dtype)}, numbers.float() * scale

    return encode


MX = [
    ({"quant_method": "mxfp8"}, torch.uint8, "weight_scale"),
    ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, torch.float8_e8m0fnu, "weight_scale_inv"),
    ({**FP8, "weight_block_size": [1, 32]}, torch.uint8, "weight_scale_inv"),
]


@pytest.mark.parametrize(("config", "dtype", "leaf"), MX)
def test_mxfp8_is_kept_as_it_is(tmp_path: Path, config: dict[str, object], dtype: torch.dtype, leaf: str) -> None:
    model = TinyModel(layers=1, hidden_size=80, intermediate_size=112)  # short last blocks
    coded, twin = write_coded(tmp_path, as_mx(dtype, leaf), config=config, model=model)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)
    params = [param for spec in prepare(str(coded), LoadOptions()).specs for param in spec.params]
    assert {param.scheme.name for param in params if "proj" in param.name} == {"mxfp8"}


@pytest.mark.parametrize(
    ("encode", "config", "scheme"),
    [
        (in_blocks(48, 20, torch.float8_e8m0fnu), {**FP8, "weight_block_size": [48, 20]}, "none"),
        (in_blocks(48, 20, torch.bfloat16), {**FP8, "weight_block_size": [48, 20]}, "fp8_per_tensor"),
        (as_mx(torch.uint8, "weight_scale"), {"quant_method": "mxfp8"}, "none"),
    ],
)
def test_verify_finds_the_streamed_model_equal_to_the_resident_one(
    tmp_path: Path, encode: Encode, config: dict[str, object], scheme: str, capfd: pytest.CaptureFixture[str]
) -> None:
    coded, _ = write_coded(tmp_path, encode, config=config, model=TinyModel(layers=1, family="phi3"))
    assert cli.run(["verify", str(coded), "--quantization", scheme]) == 0, capfd.readouterr().err
    assert "equal to the bit" in capfd.readouterr().out


def test_mxfp8_is_quantized_anew_by_way_of_wide_numbers(tmp_path: Path) -> None:
    coded, twin = write_coded(
        tmp_path, as_mx(torch.uint8, "weight_scale"), config={"quant_method": "mxfp8"}, model=TinyModel(layers=1)
    )
    found = logits_of(coded, IDS, quantization="int8_per_channel")
    torch.testing.assert_close(found, logits_of(twin, IDS, quantization="int8_per_channel"), rtol=1e-5, atol=1e-5)


def test_blocks_are_quantized_anew_where_a_part_begins_inside_one(tmp_path: Path) -> None:
    config = {**FP8, "weight_block_size": [48, 20]}
    model = TinyModel(layers=1, family="phi3")
    coded, twin = write_coded(tmp_path, in_blocks(48, 20, torch.float32), config=config, model=model)
    found = logits_of(coded, IDS, quantization="int8_per_channel")
    torch.testing.assert_close(found, logits_of(twin, IDS, quantization="int8_per_channel"), rtol=1e-5, atol=1e-5)


def test_a_grid_of_other_blocks_is_refused_with_both_shapes(tmp_path: Path) -> None:
    config = {**FP8, "weight_block_size": [64, 64]}
    coded, _ = write_coded(tmp_path, in_blocks(32, 64, torch.float32), config=config, model=TinyModel(layers=1))
    with pytest.raises(CheckpointError) as raised:
        prepare(str(coded), LoadOptions())
    message = str(raised.value)
    assert "gate_proj.weight_scale_inv in model.safetensors: shape [3, 1], but FP8, scales per block" in message
    assert "makes it [2, 1]" in message


@pytest.mark.parametrize("size", [[128], [0, 128], "128", [128, 128.0], [True, 128]])
def test_a_block_size_that_is_none_is_refused(tmp_path: Path, size: object) -> None:
    config = {**FP8, "weight_block_size": size}
    coded, _ = write_coded(tmp_path, in_blocks(128, 128, torch.float32), config=config, model=TinyModel(layers=1))
    with pytest.raises(CheckpointError, match=r"weight_block_size .* are needed, such as"):
        prepare(str(coded), LoadOptions())


def test_codes_without_any_configuration_are_one_line_that_names_it(tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, in_blocks(128, 128, torch.float32), config=FP8, model=TinyModel(layers=1))
    raw = json.loads((coded / "config.json").read_text(encoding="utf-8"))
    del raw["quantization_config"]
    (coded / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(CheckpointError, match="F8_E4M3 with weight_scale_inv and 6 more weights are so") as raised:
        prepare(str(coded), LoadOptions())
    assert "config.json has no quantization_config" in str(raised.value)
    assert "1 problem in the checkpoint" in str(raised.value)


def test_other_8_bit_floats_are_refused_by_name(tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, in_blocks(128, 128, torch.float32), config=FP8, model=TinyModel(layers=1))
    file = coded / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(b'"F8_E4M3"', b'"F8_E4M3FNUZ"')
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    with pytest.raises(CheckpointError, match="dtype F8_E4M3FNUZ: codes of another 8-bit float"):
        prepare(str(coded), LoadOptions())


def test_e5m2_weights_are_refused(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return {"weight": weight.to(torch.float8_e5m2), "weight_scale": torch.tensor(1.0)}, weight

    coded, _ = write_coded(tmp_path, encode, config=FP8, model=TinyModel(layers=1))
    with pytest.raises(CheckpointError, match="weight is F8_E5M2, but FP8 weights are F8_E4M3"):
        prepare(str(coded), LoadOptions())


def test_e8m0_scales_are_read_exactly_whatever_their_code(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers = torch.full_like(weight, 0.5).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": codes[: weight.shape[0]].clone().unsqueeze(1)}, weight

    coded, _ = write_coded(tmp_path, encode, config=FP8, model=TinyModel(layers=1, hidden_size=256, head_dim=64))
    with LLM(str(coded)) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters()) | dict(llm.shell.named_buffers())
        scale = kept["model.layers.0.self_attn.o_proj.weight_scale"]
    wanted = torch.tensor([2.0 ** (code - 127) for code in range(255)])
    assert same_bits(scale[:255].detach(), wanted)
    assert scale[255].isnan()


def test_other_dtypes_of_scales_are_refused(tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, in_blocks(128, 128, torch.float32), config=FP8, model=TinyModel(layers=1))
    tensors = load_file(coded / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    save_file(tensors | {name: tensors[name].double()}, coded / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"weight_scale_inv in model\.safetensors: dtype F64, but FP8"):
        prepare(str(coded), LoadOptions())
