"""gpt-oss as it is published: experts in MXFP4, kept as they are; gate and up, which take turns there, are parted."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant.disk_forms.form import FoundTensor
from quant.disk_forms.mxfp4 import MxFp4OnDisk, mxfp4_method
from quant.dtypes import DType
from quant.errors import QuantError
from quant.microscaling import MxFp4
from streaming import LLM, LoadOptions, cli
from streaming.errors import CheckpointError
from streaming.prepare import prepare
from tests.streaming.coded import Tensors, logits_of
from tests.streaming.resident import same_bits
from tests.test_against_transformers import write_checkpoint

PROJECTIONS = ("gate_up_proj", "down_proj")
IDS = [5, 9, 7, 21, 3, 3, 60, 2]
EXPERTS, WIDTH, INNER = 5, 96, 64
CHANGES = {
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
    "head_dim": 16, "sliding_window": 4, "dtype": "bfloat16",
}  # fmt: skip
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
Convert = Callable[..., torch.Tensor]


@pytest.fixture(scope="module")
def to_wide() -> Convert:
    """transformers' own: blocks and scales of all experts -> [experts, in, out]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Convert = import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, to_wide: Convert) -> tuple[Path, Path]:
    """The quantized model, and its twin with the wide float32 weights that it stands for."""
    root = tmp_path_factory.mktemp("mxfp4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_checkpoint(import_module("transformers"), "gpt_oss", CHANGES, folder=root / "original")
    wide = load_file(root / "original" / "model.safetensors")
    coded, twin = {name: tensor.bfloat16() for name, tensor in wide.items()}, {}
    twin.update({name: tensor.float() for name, tensor in coded.items()})
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in wide if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        _, inputs, outputs = wide[name].shape
        blocks = torch.randint(256, (EXPERTS, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        del coded[name]
        coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        twin[name] = to_wide(blocks, scales, dtype=torch.float32).contiguous()
        assert twin[name].shape == wide[name].shape
    return write(root, "coded", coded, CONFIG), write(root, "twin", twin, None)


def write(root: Path, name: str, tensors: Tensors, quantization: dict[str, Any] | None) -> Path:
    folder = root / name
    folder.mkdir()
    raw = json.loads((root / "original" / "config.json").read_text(encoding="utf-8"))
    raw["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_logits_are_those_of_the_numbers_that_transformers_makes_of_the_codes(folders: tuple[Path, Path]) -> None:
    coded, twin = folders
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["direct", "lazy", "eager", "prefetch"])
def test_an_expert_stands_for_the_very_numbers_that_transformers_makes_of_it(
    folders: tuple[Path, Path], strategy: str
) -> None:
    coded, twin = folders
    wide = load_file(twin / "model.safetensors")
    on_disk = sum(tensor.nbytes for tensor in load_file(coded / "model.safetensors").values())
    with LLM(str(coded), safetensors_load_strategy=strategy) as llm:
        llm.wait_loaded()
        experts = llm.shell.get_submodule("model.layers.1.mlp.experts")
        for expert in range(EXPERTS):
            found = [expert_of(experts.get_submodule(proj), expert) for proj in PROJECTIONS]
            gate_up, down = (wide[f"model.layers.1.mlp.experts.{proj}"][expert].T for proj in PROJECTIONS)
            assert same_bits(found[0], torch.cat((gate_up[0::2], gate_up[1::2])))
            assert same_bits(found[1], down.contiguous())
        assert llm.stats().bytes_read == on_disk == prepare(str(coded), LoadOptions()).plan.read_nbytes


def expert_of(projection: Any, expert: int) -> torch.Tensor:
    wide: torch.Tensor = MxFp4().dequantize(projection.stored(expert), projection.sections, dtype=torch.float32)
    return wide


def test_experts_are_kept_in_four_bits_and_all_else_is_wide(folders: tuple[Path, Path]) -> None:
    prepared = prepare(str(folders[0]), LoadOptions())
    schemes = {param.name: param.scheme.name for spec in prepared.specs for param in spec.params}
    assert {name for name, scheme in schemes.items() if scheme == "mxfp4"} == {
        f"model.layers.{layer}.mlp.experts.{proj}.weight" for layer in (0, 1) for proj in PROJECTIONS
    }
    items = [item for item in prepared.plan.items if item.leaf]
    assert len(items) == 2 * EXPERTS * 4  # an expert's codes and scales are read by themselves
    assert {item.tensor.name.rpartition(".")[2] for item in items if item.direct} == {
        "down_proj_blocks", "down_proj_scales"
    }  # fmt: skip


def test_verify_finds_the_streamed_model_equal_to_the_resident_one(
    folders: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["verify", str(folders[0])]) == 0, capfd.readouterr().err
    assert "equal to the bit" in capfd.readouterr().out


def test_another_scheme_for_codes_of_four_bits_is_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj\.weight is already quantized on disk \(MXFP4\)"):
        prepare(str(folders[0]), LoadOptions(quantization="int8_per_channel"))


def test_all_faults_that_headers_show_come_in_one_report(folders: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(folders[0] / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"] = torch.zeros(EXPERTS, 3, 3, 16, dtype=torch.uint8)
    (tmp_path / "config.json").write_bytes((folders[0] / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        prepare(str(tmp_path), LoadOptions())
    message = str(raised.value)
    assert "model.layers.0.mlp.experts.0.down_proj: its weight is MXFP4, but it has no scales" in message
    wrong = "experts.gate_up_proj_blocks in model.safetensors: shape [3, 3, 16], but MXFP4 makes it [128, 3, 16]"
    assert wrong in message


def test_what_the_configuration_names_is_wide_with_all_that_is_within() -> None:
    method = mxfp4_method(CONFIG)
    assert method.excludes("model.layers.11.self_attn.q_proj")
    assert method.excludes("lm_head")
    assert not method.excludes("model.layers.11.mlp.experts.3.down_proj")
    assert not mxfp4_method({"quant_method": "mxfp4"}).excludes("lm_head")
    with pytest.raises(QuantError, match="modules_to_not_convert"):
        mxfp4_method({"modules_to_not_convert": "lm_head"})


def test_a_row_is_whole_blocks() -> None:
    found = {leaf: FoundTensor((4, 2, 16)[: 3 - (leaf == "scales")], DType.U8) for leaf in ("blocks", "scales")}
    method = mxfp4_method({})
    assert method.form_of("m", found, (4, 64)) == MxFp4OnDisk()
    assert method.form_of("m", {"weight": FoundTensor((4, 64), DType.BF16)}, (4, 64)) is None
    with pytest.raises(QuantError, match="its 65 inputs are no whole blocks of 32"):
        method.form_of("m", found, (4, 65))
