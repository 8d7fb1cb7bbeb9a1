"""GPTQ and AWQ checkpoints: streamed as they are, equal to what their numbers stand for and to the resident model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from layers.config import parse_config
from layers.model_config import ModelConfig
from streaming import LLM, LoadOptions, cli
from streaming.errors import CheckpointError, LayerLoadError
from streaming.prepare import prepare
from tests.layers.tiny import random_weights, raw_config
from tests.quant.word_packing import Codes, kept_bytes, packed_across, packed_awq, packed_down
from tests.streaming.coded import Encode, Tensors, logits_of, write_coded

IDS = [5, 9, 7, 21]
EXPERTS = 3
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
Q_PROJ = "model.layers.1.self_attn.q_proj"


def quantized(weight: torch.Tensor, order: Codes, bits: int) -> tuple[Codes, Codes, torch.Tensor, torch.Tensor]:
    """Codes [I, O], zeros [G, O], float16 scales [G, O], and what they stand for, float32 [O, I]; order: the group of
    each input."""
    wide, largest = weight.float().numpy().T, (1 << bits) - 1
    groups = [wide[order == group] for group in range(order.max() + 1)]
    high, low = np.stack([part.max(0) for part in groups]), np.stack([part.min(0) for part in groups])
    scales = ((high - low) / largest).astype(np.float16)
    zeros = np.clip(np.round(-low / scales), 1, largest).astype(np.int64)
    codes = np.clip(np.round(wide / scales[order]) + zeros[order], 0, largest).astype(np.int64)
    numbers = (codes - zeros[order]).astype(np.float32) * scales[order].astype(np.float32)
    return codes, zeros, torch.from_numpy(scales), torch.from_numpy(numbers.T.copy())


def gptq(bits: int = 4, group_size: int = 32, *, offset: int = 1, shuffled: bool = False) -> Encode:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        order = np.arange(weight.shape[1]) // (group_size if group_size > 0 else weight.shape[1])
        if shuffled:
            order = np.random.default_rng(len(module)).permutation(order)
        codes, zeros, scales, numbers = quantized(weight, order, bits)
        qzeros = packed_across(zeros - offset, bits)
        tensors = {"qweight": packed_down(codes, bits), "qzeros": qzeros, "scales": scales}
        return tensors | {"g_idx": torch.from_numpy(order).int()}, numbers

    return encode


def awq(layout: str = "gemm") -> Encode:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = weight.shape[1] // 32
        codes, zeros, scales, numbers = quantized(weight, np.arange(weight.shape[1]) // 32, 4)
        if layout == "gemm":
            return {"qweight": packed_awq(codes), "qzeros": packed_awq(zeros), "scales": scales}, numbers
        padded = np.pad(zeros.T, ((0, 0), (0, 32 - groups)))
        wide_scales = torch.zeros(weight.shape[0], 32).half()
        wide_scales[:, :groups] = scales.T
        tensors = {"qweight": packed_across(codes.T, 4), "qzeros": packed_across(padded, 4), "scales": wide_scales}
        return tensors, numbers

    return encode


FORMS: dict[str, tuple[Encode, dict[str, Any]]] = {
    "gptq": (gptq(), GPTQ),
    "gptq_v2": (gptq(offset=0), {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False}),
    "gptq_one_group": (gptq(group_size=-1), {**GPTQ, "group_size": -1, "desc_act": True}),
    "gptq_ordered": (gptq(shuffled=True), {**GPTQ, "desc_act": True}),
    "gptq_2": (gptq(2), {**GPTQ, "bits": 2}),
    "gptq_3": (gptq(3), {**GPTQ, "bits": 3}),
    "gptq_8": (gptq(8), {**GPTQ, "bits": 8, "quant_method": "gptq_marlin"}),
    "gptq_short_group": (gptq(group_size=40), {**GPTQ, "group_size": 40}),
    "awq": (awq(), AWQ),
    "awq_gemv": (awq("gemv"), {**AWQ, "version": "GEMV"}),
}


def written(folder: Path, form: str, **model: Any) -> tuple[Path, Path]:
    encode, config = FORMS[form]
    return write_coded(folder, encode, config=config, model=TinyModel(layers=2, **model))


def changed(folder: Path, change: Callable[[Tensors], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def with_config(folder: Path, config: object) -> Path:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    extra = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(raw | extra), encoding="utf-8")
    return folder


# phi3's projections are fused on disk; qwen2's q, k and v have biases
CASES = [
    *((form, "llama") for form in FORMS),
    *((f, m) for f in ("gptq_ordered", "gptq_3", "awq") for m in ("phi3", "qwen2")),
]


@pytest.mark.parametrize(("form", "family"), CASES)
def test_logits_are_those_of_the_numbers_that_the_codes_stand_for(tmp_path: Path, form: str, family: str) -> None:
    coded, twin = written(tmp_path, form, family=family)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["direct", "lazy", "eager", "prefetch"])
def test_codes_of_fused_parts_are_kept_to_the_bit(tmp_path: Path, strategy: str) -> None:
    coded, _ = written(tmp_path, "gptq_ordered")
    original = load_file(coded.parent / "original" / "model-00002-of-00002.safetensors")
    on_disk, wanted, orders = load_file(coded / "model.safetensors"), [], []
    for part in "qkv":
        name = f"model.layers.1.self_attn.{part}_proj"
        order = on_disk[f"{name}.g_idx"]
        codes, *_ = quantized(original[f"{name}.weight"], order.numpy(), 4)
        wanted.append(kept_bytes(codes, 4))
        orders.append(order)
    with LLM(str(coded), safetensors_load_strategy=strategy) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters())
        assert torch.equal(kept["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(wanted))
        assert torch.equal(kept["model.layers.1.self_attn.qkv_proj.g_idx"], torch.stack(orders))
        assert llm.stats().bytes_read == prepare(str(coded), LoadOptions()).plan.read_nbytes


@pytest.mark.parametrize(("form", "family"), [("gptq_ordered", "qwen2"), ("awq", "phi3")])
def test_verify_finds_the_streamed_model_equal_to_the_resident_one(
    tmp_path: Path, form: str, family: str, capfd: pytest.CaptureFixture[str]
) -> None:
    coded, _ = written(tmp_path, form, family=family)
    assert cli.run(["verify", str(coded)]) == 0, capfd.readouterr().err
    assert "equal to the bit" in capfd.readouterr().out


def test_a_head_may_be_quantized_too(tmp_path: Path) -> None:
    coded, twin = written(tmp_path, "gptq")
    head = load_file(coded / "model.safetensors")["lm_head.weight"]
    tensors, numbers = gptq()("lm_head", head)

    def replace_head(found: Tensors) -> None:
        del found["lm_head.weight"]
        found |= {f"lm_head.{leaf}": tensor for leaf, tensor in tensors.items()}

    changed(coded, replace_head)
    changed(twin, lambda found: found.update({"lm_head.weight": numbers}))
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)
    kept = {param.name: param.scheme.name for spec in prepare(str(coded), LoadOptions()).specs for param in spec.params}
    assert kept["lm_head.weight"] == "int4_per_group:asym"


def test_modules_of_other_bits_and_wide_ones_lie_side_by_side(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if module.endswith("o_proj"):
            return None
        return gptq(8, -1)(module, weight) if module.endswith(("v_proj", "down_proj")) else gptq()(module, weight)

    dynamic = {"-:.*\\.o_proj": {}, "+:.*\\.(v|down)_proj": {"bits": 8, "group_size": -1}}
    coded, twin = write_coded(tmp_path, encode, config={**GPTQ, "dynamic": dynamic})
    kept = {param.name: param.scheme.name for spec in prepare(str(coded), LoadOptions()).specs for param in spec.params}
    assert kept["model.layers.0.self_attn.qkv_proj.weight"] == "none"  # of two forms: no one product reads them
    assert kept["model.layers.0.self_attn.o_proj.weight"] == "none"
    assert kept["model.layers.0.mlp.down_proj.weight"] == "int8_per_group:row:asym"
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "file", "config"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_a_configuration_in_a_file_of_its_own_is_read(
    tmp_path: Path, form: str, file: str, config: dict[str, Any]
) -> None:
    coded, twin = written(tmp_path, form)
    with_config(coded, None)
    (coded / file).write_text(json.dumps(config), encoding="utf-8")
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)
    if form == "gptq":
        dropped = prepare(str(coded), LoadOptions()).plan.dropped
        assert "the usual one" in dropped[f"{Q_PROJ}.g_idx"]
        (coded / file).write_text(json.dumps({**config, "bits": 7}), encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"quantize_config.json: .*bits 7: GPTQ weights of 2, 3, 4, 8 bits"):
            prepare(str(coded), LoadOptions())


def test_an_order_that_the_configuration_does_not_announce_is_a_fault(tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, gptq(shuffled=True), config=GPTQ)
    with pytest.raises(
        CheckpointError, match=r"q_proj.g_idx in .*: an order of groups \(g_idx\) that is not the usual"
    ):
        prepare(str(coded), LoadOptions())
    with_config(coded, None)  # the group size stands where the weight's form has it, not in config.json
    (coded / "quantize_config.json").write_text(json.dumps({**GPTQ, "group_size": 32}), encoding="utf-8")
    usual_of_16 = torch.arange(64, dtype=torch.int32) // 16
    changed(coded, lambda found: found.update({f"{Q_PROJ}.g_idx": usual_of_16}))
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ}.g_idx in .*: an order of groups"):
        prepare(str(coded), LoadOptions())


def test_an_order_that_names_no_group_ends_the_load_with_its_name(tmp_path: Path) -> None:
    coded, _ = written(tmp_path, "gptq_ordered")
    changed(coded, lambda found: found[f"{Q_PROJ}.g_idx"].fill_(7))
    with pytest.raises(LayerLoadError, match=rf"{Q_PROJ}.g_idx.*g_idx names groups 7 to 7, but there are 2"):
        logits_of(coded, IDS)


def test_all_faults_that_headers_show_come_in_one_report(tmp_path: Path) -> None:
    coded, _ = written(tmp_path, "gptq_ordered")

    def spoil(found: Tensors) -> None:
        del found["model.layers.0.mlp.down_proj.qzeros"]
        del found["model.layers.0.mlp.up_proj.scales"]
        del found["model.layers.0.self_attn.k_proj.g_idx"]
        found["model.layers.1.mlp.down_proj.qweight"] = found["model.layers.1.mlp.down_proj.qweight"][:-1]
        found["model.layers.1.mlp.up_proj.scales"] = found["model.layers.1.mlp.up_proj.scales"].double()
        found["model.layers.1.self_attn.o_proj.weight"] = torch.zeros(64, 64)

    with pytest.raises(CheckpointError) as raised:
        prepare(str(changed(coded, spoil)), LoadOptions())
    message = str(raised.value)
    assert "6 problems" in message
    assert "model.layers.0.mlp.down_proj.qzeros is missing (the weight is GPTQ, 4 bits in groups of 32)" in message
    assert "model.layers.0.mlp.up_proj.scales is missing" in message
    assert "model.layers.0.self_attn.k_proj.g_idx is missing" in message
    assert (
        "down_proj.qweight in model.safetensors: shape [11, 64], but GPTQ, 4 bits in groups of 32 makes it" in message
    )
    assert "up_proj.scales in model.safetensors: dtype F64" in message
    assert "model.layers.1.self_attn.o_proj: weight and qweight are both there" in message


def test_sizes_that_awq_cannot_have_are_told_for_every_weight(tmp_path: Path) -> None:
    coded, _ = written(tmp_path, "awq")
    with_config(coded, {**AWQ, "group_size": 64})
    with pytest.raises(CheckpointError) as raised:
        prepare(str(coded), LoadOptions())
    assert "down_proj: its 96 inputs are not a multiple of group_size 64" in str(raised.value)
    assert "q_proj.scales in model.safetensors: shape [2, 64], but AWQ (gemm), 4 bits in groups of 64" in str(
        raised.value
    )


def test_a_plan_names_the_scheme_that_the_files_are_in(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    coded, shards = written(tmp_path, "gptq")[0], tmp_path / "shards"
    assert cli.run(["save-shards", str(coded), "--out", str(shards), "--quiet"]) == 0
    for model, words in ((coded, "on disk int4_per_group:asym"), (shards, "int4_per_group:asym")):
        capfd.readouterr()
        assert cli.run(["plan", str(model)]) == 0
        assert f", bfloat16, quantization {words}, " in capfd.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_another_scheme_is_one_clear_refusal(tmp_path: Path, form: str) -> None:
    coded, _ = written(tmp_path, form)
    with pytest.raises(CheckpointError, match=r"1 problem ") as raised:
        prepare(str(coded), LoadOptions(quantization="int8_per_channel"))
    assert "is already quantized on disk (" in str(raised.value)
    assert "leave --quantization out" in str(raised.value)


def expert_weights(config: ModelConfig) -> Tensors:
    """Random weights with each expert's projections by themselves."""
    weights: Tensors = {}
    for name, tensor in random_weights(config).items():
        module, _, last = name.removesuffix(".weight").rpartition(".")
        if not module.endswith(".experts"):
            weights[name] = tensor
            continue
        projections = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        parts = tensor.chunk(EXPERTS * len(projections))
        for number, part in enumerate(parts):
            expert, projection = divmod(number, len(projections))
            weights[f"{module}.{expert}.{projections[projection]}.weight"] = part.clone()
    return weights


@pytest.mark.parametrize("form", ["gptq_ordered", "awq"])
def test_experts_are_kept_in_their_own_codes(tmp_path: Path, form: str) -> None:
    encode, stated = FORMS[form]
    changes = {
        "hidden_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 32, "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "head_dim": 16,
    }  # fmt: skip
    raw = raw_config("qwen3_moe", **changes)
    coded, twin = dict(expert_weights(parse_config(raw))), dict(expert_weights(parse_config(raw)))
    for name in [name for name in coded if ".experts." in name]:
        tensors, numbers = encode(name, coded.pop(name))
        coded |= {f"{name.removesuffix('.weight')}.{leaf}": tensor.contiguous() for leaf, tensor in tensors.items()}
        twin[name] = numbers
    for folder, found, config in (("coded", coded, raw | {"quantization_config": stated}), ("twin", twin, raw)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(found, tmp_path / folder / "model.safetensors")
    found_specs = prepare(str(tmp_path / "coded"), LoadOptions()).specs
    kept = {param.name: param.scheme for spec in found_specs for param in spec.params}
    assert kept["model.layers.0.mlp.experts.down_proj.weight"].name.startswith("int4_per_group:asym")
    expected = logits_of(tmp_path / "twin", IDS)
    torch.testing.assert_close(logits_of(tmp_path / "coded", IDS), expected, rtol=1e-5, atol=1e-5)
