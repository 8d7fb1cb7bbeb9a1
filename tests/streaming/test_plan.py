"""The plan: which bytes become which parameter, every problem in one report, and runs of rows that cover everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.write_tiny_model import ARCHITECTURES, TinyModel
from quant.dtypes import DType
from streaming.checkpoint.tensors import Encoding
from streaming.errors import CheckpointError, MissingTensorError, TensorMismatchError
from streaming.leftovers import holds_only_zeros
from streaming.plan import LoadPlan
from streaming.prepare import read_tensor
from tests.streaming.planned import Blocks, Tensors, plan_of, tensor, tensors_of

LLAMA = TinyModel(layers=2)
Q0 = "model.layers.0.self_attn.q_proj.weight"


def renamed(tensors: Tensors, change: dict[str, str]) -> Tensors:
    new = {change.get(name, name): info for name, info in tensors.items()}
    return {name: replace(info, name=name) for name, info in new.items()}


def problems_of(tensors: Tensors, model: TinyModel = LLAMA, **how: object) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        plan_of(model, tensors, **how)  # type: ignore[arg-type]
    return caught.value


def test_the_golden_table_of_a_tiny_llama() -> None:
    """hidden 64, 4 heads of 16, 2 kv heads, intermediate 96, vocabulary 160, two bytes each; by hand."""
    plan = plan_of(LLAMA)
    block = 2 * (64 + 64 * 64 + 2 * 32 * 64 + 64 * 64 + 64 + 3 * 96 * 64)
    table = [(layer.name, len(layer.items), layer.read_nbytes, layer.kept_nbytes) for layer in plan.layers]
    assert table == [
        ("layers.0", 9, 61696, 61696),
        ("layers.1", 9, 61696, 61696),
        ("head", 2, 20608, 20608),
        ("embed", 1, 20480, 20480),
    ]
    assert block == 61696
    assert plan.read_nbytes == plan.kept_nbytes == 2 * 61696 + 20608 + 20480
    assert (plan.dropped, plan.warnings, plan.largest_staged_nbytes) == ({}, (), 0)


def test_the_golden_items_of_one_layer() -> None:
    plan = plan_of(LLAMA)
    rows = [
        (item.index, item.param.name.removeprefix("model.layers.1."), item.section,
         item.tensor.name.removeprefix("model.layers.1."), item.rows, item.section_rows, item.direct)
        for item in plan.layers[1].items
    ]  # fmt: skip
    assert rows == [
        (9, "input_layernorm.weight", 0, "input_layernorm.weight", (0, 64), (0, 64), True),
        (10, "self_attn.qkv_proj.weight", 0, "self_attn.q_proj.weight", (0, 64), (0, 64), True),
        (11, "self_attn.qkv_proj.weight", 1, "self_attn.k_proj.weight", (0, 32), (0, 32), True),
        (12, "self_attn.qkv_proj.weight", 2, "self_attn.v_proj.weight", (0, 32), (0, 32), True),
        (13, "self_attn.o_proj.weight", 0, "self_attn.o_proj.weight", (0, 64), (0, 64), True),
        (14, "post_attention_layernorm.weight", 0, "post_attention_layernorm.weight", (0, 64), (0, 64), True),
        (15, "mlp.gate_up_proj.weight", 0, "mlp.gate_proj.weight", (0, 96), (0, 96), True),
        (16, "mlp.gate_up_proj.weight", 1, "mlp.up_proj.weight", (0, 96), (0, 96), True),
        (17, "mlp.down_proj.weight", 0, "mlp.down_proj.weight", (0, 64), (0, 64), True),
    ]


def test_offsets_count_from_the_file_and_rows_within_the_tensor() -> None:
    plan = plan_of(LLAMA, item_nbytes=2048)  # 16 rows of 64 two-byte numbers
    items = [item for item in plan.items if item.tensor.name == Q0]
    first = tensors_of(LLAMA)[Q0].offset
    assert [(item.file_offset, item.nbytes) for item in items] == [(first + 2048 * n, 2048) for n in range(4)]


def test_the_same_headers_give_the_same_plan_and_nothing_is_changed() -> None:
    tensors = tensors_of(LLAMA)
    before = dict(tensors)
    assert plan_of(LLAMA, tensors) == plan_of(LLAMA, tensors)
    assert tensors == before


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_is_planned_whole(family: str, tied: bool) -> None:
    model = TinyModel(family=family, tied=tied)
    plan = plan_of(model)
    assert Counter(item.tensor.name for item in plan.items).keys() == tensors_of(model).keys()
    assert plan.read_nbytes == sum(info.nbytes for info in tensors_of(model).values())
    assert covers_everything_once(plan)


def test_phi3_is_cut_from_what_is_fused_on_disk() -> None:
    plan = plan_of(TinyModel(family="phi3", layers=1))
    qkv = [item for item in plan.items if "qkv_proj" in item.tensor.name]
    assert [(item.section, item.rows) for item in qkv] == [(0, (0, 64)), (1, (64, 96)), (2, (96, 128))]
    gate_up = [item for item in plan.items if "gate_up_proj" in item.tensor.name]
    assert [(item.section, item.rows) for item in gate_up] == [(0, (0, 96)), (1, (96, 192))]


def test_a_llama_may_be_fused_on_disk_too() -> None:
    tensors = tensors_of(LLAMA)
    for part in ("q", "k", "v"):
        del tensors[f"model.layers.0.self_attn.{part}_proj.weight"]
    name = "model.layers.0.self_attn.qkv_proj.weight"
    plan = plan_of(LLAMA, {**tensors, name: tensor(name, (128, 64))})
    assert [item.rows for item in plan.items if item.tensor.name == name] == [(0, 64), (64, 96), (96, 128)]


# --- problems -------------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named_as_a_checkpoint_calls_it() -> None:
    tensors = tensors_of(LLAMA)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    error = problems_of(tensors)
    assert isinstance(error, MissingTensorError)
    assert error.problems == (
        "model.layers.1.mlp.up_proj.weight is missing (part 'up' of model.layers.1.mlp.gate_up_proj.weight)",
    )
    assert str(error).startswith("/models/tiny: 1 problem in the checkpoint\n  model.layers.1.mlp.up_proj.weight")


def test_a_name_without_a_home_is_given_the_nearest_names_and_its_modules_parameters() -> None:
    tensors = tensors_of(LLAMA)
    name = "model.layers.0.self_attn.o_proj.wieght"
    error = problems_of({**tensors, name: tensor(name, (64, 64))})
    assert isinstance(error, TensorMismatchError)
    (problem,) = error.problems
    assert problem.startswith(f"{name} in model.safetensors: no parameter of the model is called so")
    assert "nearest: model.layers.0.self_attn.o_proj.weight" in problem
    assert "model.layers.0.self_attn.o_proj has weight" in problem


def test_a_shape_that_differs_is_told_with_both_shapes_and_the_file() -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    error = problems_of(tensors_of(LLAMA) | {name: tensor(name, (64, 64))})
    assert error.problems == (f"{name} in model.safetensors: shape [64, 64], but the config makes it [32, 64]",)


def test_a_dtype_that_is_no_float_weight_is_told() -> None:
    error = problems_of(tensors_of(LLAMA) | {Q0: tensor(Q0, (64, 64), dtype=DType.I32)})
    (problem,) = error.problems
    assert problem.startswith(f"{Q0} in model.safetensors: dtype I32, but a float weight is needed (F64, F32, F16 or ")


def test_two_tensors_for_one_place_are_told() -> None:
    name = "model.layers.0.self_attn.qkv_proj.weight"
    error = problems_of(tensors_of(LLAMA) | {name: tensor(name, (128, 64))})
    assert len(error.problems) == 3
    assert f"{name} and model.layers.0.self_attn.q_proj.weight both fill part 'q' of {name}" in error.problems


def test_all_problems_come_in_one_report() -> None:
    tensors = tensors_of(LLAMA)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.down_proj.weight"]
    tensors |= {Q0: tensor(Q0, (63, 64)), "extra.weight": tensor("extra.weight", (1,))}
    error = problems_of(tensors)
    assert isinstance(error, TensorMismatchError)
    assert len(error.problems) == 4
    for word in ("model.norm.weight is missing", "down_proj.weight is missing", "shape [63, 64]", "extra.weight in"):
        assert sum(word in problem for problem in error.problems) == 1
        assert word in str(error)


def test_a_long_report_is_cut_and_says_so() -> None:
    error = problems_of({}, TinyModel(layers=6))
    assert len(error.problems) == 6 * 9 + 3
    assert str(error).endswith("... and 17 more")


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_rotary_tables_are_dropped_with_the_reason(name: str) -> None:
    plan = plan_of(LLAMA, tensors_of(LLAMA) | {name: tensor(name, (8,))})
    assert list(plan.dropped) == [name]
    assert "rotary table" in plan.dropped[name]


def test_layers_beyond_the_configs_number_are_dropped_with_the_reason() -> None:
    plan = plan_of(LLAMA, tensors_of(TinyModel(layers=3)))
    assert len(plan.dropped) == 9
    assert set(plan.dropped.values()) == {"layer 2 lies beyond num_hidden_layers = 2"}


# --- biases ---------------------------------------------------------------------------------------------------------

BIAS = "model.layers.0.self_attn.o_proj.bias"


def test_a_stray_bias_of_zeros_is_dropped() -> None:
    plan = plan_of(LLAMA, tensors_of(LLAMA) | {BIAS: tensor(BIAS, (64,))}, read=lambda info: bytes(info.nbytes))
    assert plan.dropped == {BIAS: "a bias of zeros for a layer without one"}


def test_a_stray_bias_that_is_not_zero_is_a_problem() -> None:
    error = problems_of(tensors_of(LLAMA) | {BIAS: tensor(BIAS, (64,))})
    (problem,) = error.problems
    module = "model.layers.0.self_attn.o_proj"
    assert problem == f"{BIAS} in model.safetensors: a bias that is not zero, but the config gives {module} none"


def test_a_bias_that_the_config_asks_for_is_never_dropped() -> None:
    model = TinyModel(family="qwen2", layers=1)
    plan = plan_of(model, read=lambda info: bytes(info.nbytes))
    assert sum(item.tensor.name.endswith(".bias") for item in plan.items) == 3
    tensors = tensors_of(model)
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    (problem,) = problems_of(tensors, model).problems
    assert problem.startswith("model.layers.0.self_attn.k_proj.bias is missing (part 'k' of")


@pytest.mark.parametrize(
    ("data", "expected"),
    [(bytes(8), True), (b"\0" * 7 + b"\1", False), (b"\0\x80" * 4, True)],
    ids=["zeros", "a one", "negative zeros"],
)
def test_only_a_bias_whose_every_number_is_zero_counts_as_zeros(tmp_path: Path, data: bytes, expected: bool) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"head" + data)
    info = replace(tensor(BIAS, (4,), offset=4), file=file)
    assert holds_only_zeros(info, read_tensor(info)) is expected


# --- tied -----------------------------------------------------------------------------------------------------------

TIED = TinyModel(layers=1, tied=True)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_a_tied_models_matrix_is_taken_under_either_name(name: str) -> None:
    plan = plan_of(TIED, renamed(tensors_of(TIED), {EMBED: name}))
    filled = [(item.layer, item.param.name, item.tensor.name) for item in plan.items if item.layer in ("head", "embed")]
    assert filled == [("head", "model.norm.weight", "model.norm.weight"), ("head", EMBED, name)]
    assert plan.table.name == name


@pytest.mark.parametrize("name", [EMBED, HEAD])
def test_a_quantized_head_of_a_tied_model_is_made_from_the_same_tensor(name: str) -> None:
    plan = plan_of(TIED, renamed(tensors_of(TIED), {EMBED: name}), scheme=Blocks(), head=True)
    filled = [(item.param.name, item.tensor.name) for item in plan.items if item.layer == "head"]
    assert filled == [("model.norm.weight", "model.norm.weight"), (EMBED, name), (HEAD, name)]


def test_a_tied_model_with_neither_name_is_told_both() -> None:
    tensors = tensors_of(TIED)
    del tensors[EMBED]
    (problem,) = problems_of(tensors, TIED).problems
    assert problem == f"{EMBED} is missing (and {HEAD} does not stand in for it)"


def test_an_untied_model_without_a_head_is_told_so() -> None:
    tensors = tensors_of(LLAMA)
    del tensors[HEAD]
    (problem,) = problems_of(tensors).problems
    assert problem == f"{HEAD} is missing (and {EMBED} does not stand in for it)"


def test_both_names_on_disk_are_both_planned_when_the_caller_says_untied() -> None:
    plan = plan_of(TIED, tensors_of(TinyModel(layers=1)), tied=False)
    assert [(layer.name, [item.tensor.name for item in layer.items][-1]) for layer in plan.layers[1:]] == [
        ("head", HEAD),
        ("embed", EMBED),
    ]


# --- runs of rows ---------------------------------------------------------------------------------------------------


def covers_everything_once(plan: LoadPlan) -> bool:
    """Whether the items' runs of rows follow one another without a gap and end with the section, for every section."""
    for layer in plan.layers:
        for param in layer.spec.params:
            for section, rows in enumerate(param.section_rows):
                runs = [item.section_rows for item in layer.items if item.param == param and item.section == section]
                stops = [0, *(stop for _, stop in runs)]
                if [start for start, _ in runs] != stops[:-1] or stops[-1] != rows:
                    return False
    return [item.index for item in plan.items] == list(range(len(plan.items)))


@settings(max_examples=60, deadline=None)
@given(
    item_nbytes=st.integers(1, 30_000),
    block=st.sampled_from([0, 1, 3, 16, 128]),
    family=st.sampled_from(("llama", "phi3")),
)
def test_runs_cover_every_row_once_and_keep_whole_blocks(item_nbytes: int, block: int, family: str) -> None:
    plan = plan_of(TinyModel(family=family, layers=1), scheme=Blocks(block), item_nbytes=item_nbytes)
    assert covers_everything_once(plan)
    for item in plan.items:
        assert item.rows[1] - item.rows[0] == item.section_rows[1] - item.section_rows[0] > 0
        if item.param.scheme.name != "blocks":
            continue
        rows = item.param.section_rows[item.section]
        if block == 0:
            assert item.section_rows == (0, rows)
        else:
            assert item.section_rows[0] % block == 0
            assert item.section_rows[1] % block == 0 or item.section_rows[1] == rows
            assert item.nbytes <= item_nbytes or item.section_rows[1] - item.section_rows[0] <= block


def test_fused_tensors_runs_begin_where_their_section_begins() -> None:
    plan = plan_of(TinyModel(family="phi3", layers=1), scheme=Blocks(16), item_nbytes=16 * 64 * 2)
    runs = [(item.section, item.rows) for item in plan.items if "qkv_proj" in item.tensor.name]
    assert runs == [
        (0, (0, 16)), (0, (16, 32)), (0, (32, 48)), (0, (48, 64)), (1, (64, 80)), (1, (80, 96)), (2, (96, 112)),
        (2, (112, 128)),
    ]  # fmt: skip


@pytest.mark.parametrize("item_nbytes", [1, 700, 5000])
def test_rows_of_an_interleaved_head_are_never_parted(item_nbytes: int) -> None:
    tensors = tensors_of(LLAMA)
    tensors[Q0] = replace(tensors[Q0], rope_heads=4)
    plan = plan_of(LLAMA, tensors, item_nbytes=item_nbytes)
    runs = [item.rows for item in plan.items if item.tensor.name == Q0]
    assert all(start % 16 == 0 and stop % 16 == 0 for start, stop in runs)
    assert covers_everything_once(plan)


def test_block_encoded_rows_are_counted_in_their_wide_size() -> None:
    """Q8_0: 34 bytes for 32 numbers, so a row of 64 is 68 bytes on disk and 256 as float32."""
    tensors = tensors_of(LLAMA)
    encoding = Encoding("Q8_0", 32, 34)
    tensors[Q0] = replace(tensors[Q0], dtype=DType.F32, nbytes=64 * 68, encoding=encoding)
    plan = plan_of(LLAMA, tensors, item_nbytes=16 * 256)
    items = [item for item in plan.items if item.tensor.name == Q0]
    assert [(item.rows, item.nbytes, item.direct) for item in items] == [
        ((start, start + 16), 16 * 68, False) for start in (0, 16, 32, 48)
    ]


@pytest.mark.parametrize(
    ("change", "direct"),
    [({}, True), ({"dtype": DType.F16}, False), ({"big_endian": True}, False), ({"rope_heads": 4}, False)],
)
def test_only_bytes_that_are_the_numbers_already_are_read_straight_to_their_place(
    change: dict[str, object], direct: bool
) -> None:
    tensors = tensors_of(LLAMA)
    tensors[Q0] = replace(tensors[Q0], **change)  # type: ignore[arg-type]
    (item,) = (item for item in plan_of(LLAMA, tensors).items if item.tensor.name == Q0)
    assert item.direct is direct


def test_nothing_is_direct_on_a_device_that_cannot_be_read_into() -> None:
    assert not any(item.direct for item in plan_of(LLAMA, direct=False).items)


# --- conversion -----------------------------------------------------------------------------------------------------


def test_narrowing_is_one_warning_with_the_count_and_the_first_name() -> None:
    plan = plan_of(LLAMA, tensors_of(LLAMA, dtype=DType.F32))
    assert plan.warnings == (
        "21 tensors stored in float32 become bfloat16 (the first: model.layers.0.input_layernorm.weight)",
    )


def test_each_pair_of_dtypes_has_a_warning_of_its_own() -> None:
    tensors = tensors_of(LLAMA, dtype=DType.F32)
    tensors[HEAD] = tensor(HEAD, (160, 64), dtype=DType.F16)
    plan = plan_of(LLAMA, tensors)
    assert sorted(plan.warnings) == [
        "1 tensor stored in float16 becomes bfloat16 (the first: lm_head.weight)",
        "20 tensors stored in float32 become bfloat16 (the first: model.layers.0.input_layernorm.weight)",
    ]


@pytest.mark.parametrize("source", [DType.BF16, DType.F16, DType.F32])
def test_exact_widening_is_silent(source: DType) -> None:
    assert plan_of(LLAMA, tensors_of(LLAMA, dtype=source), dtype=DType.F32).warnings == ()


def test_a_weight_that_is_quantized_from_what_is_on_disk_is_not_called_narrowed() -> None:
    """Only the five norms, the table and the head become bfloat16; the projections are quantized from float32."""
    plan = plan_of(LLAMA, tensors_of(LLAMA, dtype=DType.F32), scheme=Blocks())
    assert plan.warnings == (
        "7 tensors stored in float32 become bfloat16 (the first: model.layers.0.input_layernorm.weight)",
    )


def test_a_tensor_cut_into_runs_or_parts_counts_once() -> None:
    model = TinyModel(family="phi3", layers=1)
    plan = plan_of(model, tensors_of(model, dtype=DType.F32), item_nbytes=1024)
    assert [warning.split()[0] for warning in plan.warnings] == [str(len(tensors_of(model)))]
