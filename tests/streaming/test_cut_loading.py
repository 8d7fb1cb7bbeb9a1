"""What each rank keeps of a model that is cut over ranks: its part, to the bit, of what one rank alone keeps."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.cuts import scale_scope
from layers.errors import ShardError
from quant.registry import scheme_names
from quant.shared_scales import Scope
from streaming.options import LoadOptions
from streaming.prepare import prepare
from tests.layers.family_cases import FAMILY_CASES
from tests.streaming.coded import write_coded
from tests.streaming.cut_loading import check_parts
from tests.streaming.test_fp8_on_disk import FP8, in_blocks
from tests.test_against_transformers import write_checkpoint

SCHEMES = (*(name for name in scheme_names() if name != "none"), "int4_per_group:64:asym")
TURNS = [
    pytest.param(*turn, marks=[] if index % 4 == 0 else pytest.mark.slow)
    for index, turn in enumerate(
        zip(FAMILY_CASES, itertools.cycle(("none", *SCHEMES)), itertools.cycle((2, 4)), strict=False)
    )
]


@pytest.mark.parametrize(("name", "scheme", "ranks"), TURNS)
def test_every_family_is_cut(name: str, scheme: str, ranks: int, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = import_module("transformers")
        transformers.logging.set_verbosity_error()
        model_type, changes = FAMILY_CASES[name]
        write_checkpoint(transformers, model_type, {**changes, "vocab_size": 160}, folder=tmp_path)
    alone = LoadOptions(quantization=scheme)
    config = prepare(str(tmp_path), alone).config
    many = LoadOptions(quantization=scheme, tensor_parallel_size=ranks)
    if config.num_heads % ranks:
        with pytest.raises(ShardError, match=f"{ranks} does not divide the model's {config.num_heads} attention heads"):
            prepare(str(tmp_path), many)
        return
    plans = check_parts(str(tmp_path), many, alone)
    whole = prepare(str(tmp_path), alone)
    assert all(plan.plan.kept_nbytes < whole.plan.kept_nbytes for plan in plans)
    if config.moe is not None:
        options = LoadOptions(quantization=scheme, tensor_parallel_size=ranks, enable_expert_parallel=True)
        check_parts(str(tmp_path), options, alone)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_scales_that_reach_over_a_cut_are_those_of_the_whole(
    scheme: str, ranks: int, tiny_folder: Callable[[TinyModel], Path]
) -> None:
    """An intermediate size of 176: parts of 88 and 44 end within blocks of 128, groups of 64, 32 and 16."""
    folder = tiny_folder(TinyModel(layers=1, intermediate_size=176, files=1))
    options = {"quantization": scheme, "quantize_head": True}
    plans = check_parts(str(folder), LoadOptions(tensor_parallel_size=ranks, **options), LoadOptions(**options))
    scopes = {
        scale_scope(param, section)
        for spec in plans[0].specs for param in spec.params for section in range(len(param.sections))
    }  # fmt: skip
    assert Scope.MAXIMA in scopes


@pytest.mark.parametrize("percentile", [90.0, 99.9])
@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel", "int8_per_channel", "fp8_per_block"])
def test_percentiles_are_those_of_the_whole(
    scheme: str, percentile: float, tiny_folder: Callable[[TinyModel], Path]
) -> None:
    folder = tiny_folder(TinyModel(layers=1, intermediate_size=176, files=1))
    alone = LoadOptions(quantization=scheme, scale_percentile=percentile)
    many = LoadOptions(quantization=scheme, scale_percentile=percentile, tensor_parallel_size=2)
    check_parts(str(folder), many, alone)


@pytest.mark.parametrize("quantization", ["none", "int8_per_channel", "fp8_per_tensor", "int4_per_group"])
@pytest.mark.parametrize(("height", "width"), [(128, 128), (48, 20), (1, 128)])
def test_weights_that_are_quantized_on_disk_are_cut(quantization: str, height: int, width: int, tmp_path: Path) -> None:
    config = {**FP8, "weight_block_size": [height, width]}
    model = TinyModel(layers=1, family="phi3")  # projections are fused on disk, with part edges inside blocks
    coded, _ = write_coded(tmp_path, in_blocks(height, width, torch.float32), config=config, model=model)
    alone = LoadOptions(quantization=quantization)
    check_parts(str(coded), LoadOptions(quantization=quantization, tensor_parallel_size=2), alone)


def test_a_rank_reads_its_part_only(tiny_folder: Callable[[TinyModel], Path]) -> None:
    folder = tiny_folder(TinyModel(layers=2, files=1))
    alone = prepare(str(folder), LoadOptions())
    plans = [prepare(str(folder), LoadOptions(tensor_parallel_size=2), rank=rank) for rank in range(2)]
    for at, plan in enumerate(plans):
        for item in plan.plan.items:
            if item.param.name.endswith("gate_up_proj.weight"):
                part = item.param.parts[item.section]
                assert (part.start, part.stop) == item.rows
                assert item.rows[0] == at * item.rows[1] // (at + 1)
                assert item.direct
    whole = {param.name for spec in alone.specs for param in spec.params if "norm" in param.name}
    shared = sum(item.read_nbytes for item in alone.plan.items if item.param.name in whole)
    assert sum(plan.plan.kept_nbytes for plan in plans) == alone.plan.kept_nbytes + shared
