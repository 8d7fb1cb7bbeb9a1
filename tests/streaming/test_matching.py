"""Names and homes: wrappers, transposed and fused matrices, leftovers, and tensors that nothing needs."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import streaming.prepare
from examples.write_tiny_model import TinyModel, config_of
from layers.architecture import layer_specs
from layers.config import parse_config, weight_map
from layers.model_config import ModelConfig
from layers.weights import WeightMap
from quant.dtypes import DType
from streaming import LLM
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError
from streaming.plan import LoadPlan, make_plan
from tests.layers.tiny import ALL_WIDE
from tests.streaming.planned import FILE, Tensors, plan_of, tensor, tensors_of

LLAMA = TinyModel(layers=2)
Q0 = "model.layers.0.self_attn.q_proj.weight"
IDS = [3, 17, 99, 4]


def renamed(tensors: Tensors, change: Callable[[str], str]) -> Tensors:
    return {change(name): replace(info, name=change(name)) for name, info in tensors.items()}


def problems_of(tensors: Tensors, **how: object) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        plan_of(LLAMA, tensors, **how)  # type: ignore[arg-type]
    return caught.value.problems


def offsets(plan: LoadPlan) -> list[int]:
    return [item.file_offset for item in plan.items]


# --- wrappers -------------------------------------------------------------------------------------------------------

WRAPPINGS: dict[str, tuple[Callable[[str], str], str]] = {
    "a compiler's": (lambda name: f"_orig_mod.{name}", "'_orig_mod.' stands"),
    "a trainer's": (lambda name: f"module.{name}", "'module.' stands"),
    "a vision model's": (lambda name: f"language_model.{name}", "'language_model.' stands"),
    "doubled": (lambda name: f"model.{name}", "'model.' stands"),
    "doubled, the head not": (lambda name: name.replace("model.", "model.model."), "'model.' stands twice"),
    "missing": (lambda name: name.removeprefix("model."), "'model.' is missing"),
    "inside": (lambda name: re.sub(r"^(model\.layers\.\d+)\.", r"\1._orig_mod.", name), "'_orig_mod.' stands"),
    "within": (lambda name: name.replace("model.", "model.language_model."), "'language_model.' stands"),
    "two of them": (lambda name: f"module._orig_mod.{name}", "'_orig_mod.' stands and 'module.' stands"),
    "three of them": (
        lambda name: "module._orig_mod." + name.removeprefix("model."),
        "'_orig_mod.' stands and 'module.' stands and 'model.' is missing",
    ),
}


@pytest.mark.parametrize("case", WRAPPINGS)
def test_what_a_wrapper_did_to_all_names_is_undone_and_told(case: str) -> None:
    wrap, words = WRAPPINGS[case]
    plan = plan_of(
        LLAMA,
        renamed(tensors_of(LLAMA), wrap),
        unwrap=not case.startswith(("a vision", "doubled", "missing", "within")),
    )
    assert offsets(plan) == offsets(plan_of(LLAMA))
    assert plan.warnings == (f"{words} in the tensors' names: read as if it were not so",)
    assert plan.unwrapped[Q0] == wrap(Q0)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_what_training_left_in_the_names_is_named_and_read_on_request(prefix: str) -> None:
    wrapped = renamed(tensors_of(LLAMA), lambda name: prefix + name)
    (problem,) = problems_of(wrapped)
    assert all(f"'{word}.' stands" in problem for word in prefix.rstrip(".").split("."))
    assert problem.endswith("in the tensors' names; --unwrap-names reads them as if it were not so")
    assert offsets(plan_of(LLAMA, wrapped, unwrap=True)) == offsets(plan_of(LLAMA))


def test_a_wrapper_is_not_undone_where_that_does_not_make_all_names_match() -> None:
    wrapped = renamed(tensors_of(LLAMA), lambda name: f"module.{name}")
    del wrapped[f"module.{Q0}"]
    problems = problems_of(wrapped)
    assert f"{Q0} is missing (part 'q' of model.layers.0.self_attn.qkv_proj.weight)" in problems
    assert any(problem.startswith("module.lm_head.weight in model.safetensors: no parameter") for problem in problems)


def test_names_that_match_are_never_touched() -> None:
    assert plan_of(LLAMA).warnings == ()
    assert plan_of(LLAMA).unwrapped == {}


# --- transposed and fused -------------------------------------------------------------------------------------------


def with_transposed(config: ModelConfig) -> WeightMap:
    return replace(weight_map(config), transposed=(re.compile(r"(qkv_proj|o_proj|down_proj)\.weight$"),))


def transposed_plan(tensors: Tensors, *, form: str = "safetensors") -> LoadPlan:
    config = parse_config(config_of(LLAMA))
    specs = layer_specs(config, dtype=DType.BF16, policy=ALL_WIDE, tied=False)
    checkpoint = Checkpoint(FILE.parent, form, tensors, (FILE,), config_of(LLAMA), {})
    return make_plan(checkpoint, specs, with_transposed(config), tied=False, direct=True, read=lambda info: b"\1")


def test_a_declared_matrix_is_transposed_although_it_is_square() -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    square = {item.tensor.name: item.tensor for item in transposed_plan(flipped(tensors_of(LLAMA))).items}
    assert (square[name].shape, square[name].strides) == ((64, 64), (1, 64))
    assert plan_of(LLAMA).read_nbytes == sum(info.nbytes for info in square.values())


def test_a_transposed_matrix_of_the_wrong_shape_is_told_as_it_lies_on_disk() -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(CheckpointError) as caught:
        transposed_plan(flipped(tensors_of(LLAMA)) | {name: tensor(name, (97, 64))})
    assert caught.value.problems == (f"{name} in model.safetensors: shape [97, 64], but the config makes it [96, 64]",)


@pytest.mark.parametrize("form", ["gguf", "dummy"])
def test_formats_with_a_layout_of_their_own_are_not_transposed(form: str) -> None:
    assert all(item.tensor.strides is None for item in transposed_plan(tensors_of(LLAMA), form=form).items)


def flipped(tensors: Tensors) -> Tensors:
    def flip(info: TensorInfo) -> TensorInfo:
        turn = re.search(r"([qkvo]_proj|down_proj)\.weight$", info.name)
        return replace(info, shape=info.shape[::-1]) if turn else info

    return {name: flip(info) for name, info in tensors.items()}


@pytest.mark.parametrize("fused", [False, True], ids=["in parts", "fused"])
def test_a_model_stored_transposed_gives_the_same_logits(
    fused: bool, tiny_folder: Callable[[TinyModel], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tiny_folder(TinyModel(layers=1, files=1))
    weights = load_file(plain / "model.safetensors")
    for name in [name for name in weights if re.search(r"([qkvo]_proj|down_proj)\.weight$", name)]:
        weights[name] = weights[name].T.contiguous()
    if fused:
        parts = [weights.pop(f"model.layers.0.self_attn.{letter}_proj.weight") for letter in "qkv"]
        weights["model.layers.0.self_attn.qkv_proj.weight"] = torch.cat(parts, dim=1)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    expected = logits_of(plain)
    monkeypatch.setattr(streaming.prepare, "weight_map", with_transposed)
    assert np.array_equal(logits_of(tmp_path), expected)


def logits_of(folder: Path) -> np.ndarray:
    with LLM(folder) as llm:
        found: np.ndarray = llm.logits(IDS).numpy()
        return found


def test_a_run_of_parts_may_be_fused_on_disk() -> None:
    """gate and up in one, while q, k and v are apart."""
    tensors = tensors_of(LLAMA)
    for layer in range(2):
        del tensors[f"model.layers.{layer}.mlp.gate_proj.weight"], tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
        name = f"model.layers.{layer}.mlp.gate_up_proj.weight"
        tensors[name] = tensor(name, (192, 64), offset=1 << 20)
    rows = [item.rows for item in plan_of(LLAMA, tensors).items if "gate_up" in item.tensor.name]
    assert rows == [(0, 96), (96, 192)] * 2


# --- leftovers ------------------------------------------------------------------------------------------------------

CACHE = "KV-cache scale: the cache is not quantized"
QUERY = "scale of a quantized attention, which is computed wide here"
HARMLESS = {
    "model.layers.0.self_attn.kv_scale": CACHE,
    "model.layers.0.self_attn.attn.k_scale": CACHE,
    "model.layers.0.self_attn.attn.v_scale": CACHE,
    "model.layers.0.self_attn.k_proj.k_scale": CACHE,
    "model.layers.0.self_attn.v_proj.v_scale": CACHE,
    "model.layers.0.self_attn.k_scale": CACHE,
    "model.layers.0.self_attn.qkv_proj.v_scale": CACHE,
    "model.layers.1.self_attn.k_zero_point": CACHE,
    "model.layers.1.self_attn.v_proj.output_scale": CACHE,
    "model.layers.1.self_attn.q_scale": QUERY,
    "model.layers.1.self_attn.q_proj.output_scale": QUERY,
    "model.layers.1.self_attn.prob_output_scale": QUERY,
}


@pytest.mark.parametrize("name", HARMLESS)
def test_scales_of_a_quantized_cache_are_dropped_under_every_name(name: str) -> None:
    plan = plan_of(LLAMA, tensors_of(LLAMA) | {name: tensor(name, (1,), dtype=DType.F32)})
    assert (plan.dropped, plan.unused) == ({name: HARMLESS[name]}, {HARMLESS[name]: 4})


def test_a_scale_of_weights_is_no_leftover() -> None:
    name = "model.layers.0.self_attn.k_proj.weight_scale"
    (problem,) = problems_of(tensors_of(LLAMA) | {name: tensor(name, (1,), dtype=DType.F32)})
    assert problem.startswith(f"{name} in model.safetensors: no parameter of the model is called so")


G_IDX = "model.layers.0.self_attn.q_proj.g_idx"
ORDERS = {
    "usual": ([i // 16 for i in range(64)], None, True),
    "usual, of the size named": ([i // 16 for i in range(64)], 16, True),
    "of another size than is named": ([i // 16 for i in range(64)], 32, False),
    "one group": ([0] * 64, -1, True),
    "one group, none named": ([0] * 64, None, True),
    "shuffled": ([(i * 7) % 64 // 16 for i in range(64)], 16, False),
    "reversed": ([3 - i // 16 for i in range(64)], None, False),
}


@pytest.mark.parametrize("case", ORDERS)
@pytest.mark.parametrize("dtype", [DType.I32, DType.I64])
def test_an_order_of_groups_is_dropped_only_where_it_is_the_usual_one(case: str, dtype: DType) -> None:
    numbers, size, usual = ORDERS[case]
    data = struct.pack(f"<64{'i' if dtype is DType.I32 else 'q'}", *numbers)
    tensors = tensors_of(LLAMA) | {G_IDX: tensor(G_IDX, (64,), dtype=dtype)}
    how = {} if size is None else {"quantization_config": {"group_size": size}}
    if usual:
        reason = "the order of groups, which is the usual one (i // group_size)"
        assert plan_with(tensors, data, how).dropped == {G_IDX: reason}
    else:
        with pytest.raises(CheckpointError, match=r"g_idx in model.safetensors: an order of groups .* not the usual"):
            plan_with(tensors, data, how)


@pytest.mark.parametrize("order", "<>")
def test_numbers_that_lie_apart_are_looked_at_without_those_between(order: str) -> None:
    """A view of every second number of a storage, as torch.save keeps it."""
    info = replace(tensor(G_IDX, (64,), dtype=DType.I32), nbytes=127 * 4, strides=(2,), big_endian=order == ">")
    usual = [number for i in range(64) for number in (i // 16, 77)][:-1]
    data = struct.pack(f"{order}127i", *usual)
    assert plan_with(tensors_of(LLAMA) | {G_IDX: info}, data, {}).dropped[G_IDX].startswith("the order of groups")
    bias = "model.layers.0.mlp.down_proj.bias"
    zeros = replace(info, name=bias, dtype=DType.F32)
    data = struct.pack(f"{order}127f", *[0.0, 77.0] * 63, 0.0)
    assert plan_with(tensors_of(LLAMA) | {bias: zeros}, data, {}).dropped[bias].startswith("a bias of zeros")


def plan_with(tensors: Tensors, data: bytes, raw: Mapping[str, object]) -> LoadPlan:
    """The plan where the small tensors hold `data` and config.json has `raw` besides."""
    config = parse_config(config_of(LLAMA))
    specs = layer_specs(config, dtype=DType.BF16, policy=ALL_WIDE, tied=False)
    checkpoint = Checkpoint(FILE.parent, "safetensors", tensors, (FILE,), {**config_of(LLAMA), **raw}, {})
    return make_plan(checkpoint, specs, weight_map(config), tied=False, direct=True, read=lambda info: data)


# --- what nothing needs ---------------------------------------------------------------------------------------------

STRAY = "model.layers.0.adapter.weight"


def test_a_tensor_without_a_home_is_a_problem_or_where_that_is_asked_for_a_warning() -> None:
    tensors = tensors_of(LLAMA) | {STRAY: tensor(STRAY, (4, 4))}
    (problem,) = problems_of(tensors)
    assert problem.startswith(f"{STRAY} in model.safetensors: no parameter of the model is called so")
    plan = plan_of(LLAMA, tensors, strict=False)
    assert plan.warnings == (f"not used, for the model has no such parameter: {STRAY}",)
    assert plan.unused == {"the model has no such parameter (enable_weights_track is false)": 32}
    assert offsets(plan) == offsets(plan_of(LLAMA))


def test_a_missing_weight_stays_a_problem_without_the_weights_track() -> None:
    tensors = tensors_of(LLAMA)
    del tensors[Q0]
    (problem,) = problems_of(tensors, strict=False)
    assert problem == f"{Q0} is missing (part 'q' of model.layers.0.self_attn.qkv_proj.weight)"


def test_the_option_turns_the_failure_into_a_warning(tiny_folder: Callable[[TinyModel], Path], tmp_path: Path) -> None:
    plain = tiny_folder(TinyModel(layers=1, files=1))
    save_file(load_file(plain / "model.safetensors") | {STRAY: torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="no parameter of the model is called so"):
        LLM(tmp_path)
    with LLM(tmp_path, model_loader_extra_config={"enable_weights_track": False}) as llm:
        found = llm.logits(IDS).numpy()
        llm.wait_loaded()
        assert llm.stats().warnings == (f"not used, for the model has no such parameter: {STRAY}",)
    assert np.array_equal(found, logits_of(plain))


def test_bytes_that_are_not_used_are_counted_by_reason() -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
        "model.layers.1.self_attn.rotary_emb.inv_freq": (8,),
        "model.layers.2.mlp.down_proj.weight": (64, 96),
    }
    plan = plan_of(LLAMA, tensors_of(LLAMA) | {name: tensor(name, shape) for name, shape in extra.items()})
    assert plan.unused == {
        "a rotary table, which the configuration determines": 32,
        "layer 2 lies beyond num_hidden_layers = 2": 64 * 96 * 2,
    }
    assert set(plan.dropped) == set(extra)
    assert plan.read_nbytes == plan_of(LLAMA).read_nbytes


@pytest.mark.parametrize("dtype", [DType.F8_E4M3, DType.F8_E5M2, DType.I8, DType.U8, DType.I32, DType.BOOL, DType.C64])
def test_a_weight_of_codes_is_refused_by_its_dtype(dtype: DType) -> None:
    (problem,) = problems_of(tensors_of(LLAMA) | {Q0: tensor(Q0, (64, 64), dtype=dtype)})
    assert f"{Q0} in model.safetensors: dtype {dtype.value}, but a float weight is needed" in problem


def test_an_emptied_weight_is_a_wrong_shape() -> None:
    (problem,) = problems_of(tensors_of(LLAMA) | {Q0: tensor(Q0, (0,))})
    assert problem == f"{Q0} in model.safetensors: shape [0], but the config makes it [64, 64]"


def test_a_table_longer_than_the_vocabulary_is_a_wrong_shape() -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    problems = problems_of(tensors_of(LLAMA) | {name: tensor(name, (163, 64)) for name in names})
    assert set(problems) == {
        f"{name} in model.safetensors: shape [163, 64], but the config makes it [160, 64]" for name in names
    }
