"""DeepSeek-V3 as it is published, FP8 in blocks: a tiny model of its table of tensors, and the true one's plan."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from examples.write_deepseek_index import DeepSeek, Row, tensor_table, write_index
from layers.kv_cache import kv_cache_nbytes
from streaming import LLM, LoadOptions, SamplingParams, cli
from streaming.errors import CheckpointError, OptionError
from streaming.prepare import prepare
from tests.streaming.coded import logits_of

ROOT = Path(__file__).parents[2]
IDS = [5, 9, 7, 21, 300, 2, 2, 11]
# Rows that are no multiple of a block: 80 of kv_a_proj_with_mqa, 260 of gate_proj.
TINY = DeepSeek(
    layers=2, dense_layers=1, experts=8, experts_per_token=3, groups=4, top_groups=2, hidden=160, intermediate=260,
    expert_intermediate=136, heads=3, q_rank=72, kv_rank=64, nope_dim=32, rope_dim=16, value_dim=24, vocab=320, files=1,
)  # fmt: skip
# plans the folder given and prints how many tensors it uses and does not use, and the peak of its memory in KiB
MEASURED = """
import re, sys
from streaming import LoadOptions
from streaming.prepare import prepare
plan = prepare(sys.argv[1], LoadOptions()).plan
used = {item.tensor.name for item in plan.items}
with open("/proc/self/status") as status:
    peak = re.search(r"VmHWM:\\s+(\\d+) kB", status.read())[1]
print(len(used), len(plan.dropped), plan.read_nbytes, peak)
"""


def numbers(row: Row, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(row.shape, generator=generator)
    if row.dtype == "F8_E4M3":
        return (values * 30).to(torch.float8_e4m3fn)
    if row.name.endswith("weight_scale_inv"):
        return values.abs() * 0.002 + 0.001
    if row.dtype == "F32":
        return values * 0.2  # the correction bias, far from what bfloat16 holds exactly
    return (1 + 0.1 * values if "norm" in row.name else values * 0.1).bfloat16()


def tensors_of(model: DeepSeek) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {row.name: numbers(row, generator) for row in tensor_table(model)}


def widened(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The float32 numbers that the tensors stand for: the scale beside the codes multiplies a block of 128 x 128."""
    wide = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        wide[name] = tensor.float()
        if tensor.dtype == torch.float8_e4m3fn:
            rows, columns = tensor.shape
            scale = tensors[f"{name}_scale_inv"]
            wide[name] *= scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return wide


def write(folder: Path, tensors: dict[str, torch.Tensor], *, quantized: bool) -> Path:
    write_index(folder, TINY)
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not quantized:
        del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("coded") / "model", tensors_of(TINY), quantized=True)


def test_logits_are_those_of_the_numbers_that_the_codes_stand_for(coded: Path, tmp_path: Path) -> None:
    twin = write(tmp_path / "twin", widened(tensors_of(TINY)), quantized=False)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [(), ("--quantization", "int8_per_channel"), ("--dtype", "float32")])
def test_verify_finds_the_streamed_model_equal_to_the_resident_one(
    coded: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["verify", str(coded), *options]) == 0
    assert "equal to the bit" in capsys.readouterr().out


def test_what_is_kept_wide_and_what_is_kept_as_on_disk(coded: Path) -> None:
    tensors = tensors_of(TINY)
    attention, gate = "model.layers.1.self_attn", "model.layers.1.mlp.gate"
    with LLM(str(coded)) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters())
    up = widened(tensors)[f"{attention}.kv_b_proj.weight"]
    assert torch.equal(kept[f"{attention}.kv_b_proj.weight"], up.bfloat16())
    down = kept[f"{attention}.kv_a_proj_with_mqa.weight"]
    assert torch.equal(down.view(torch.uint8), tensors[f"{attention}.kv_a_proj_with_mqa.weight"].view(torch.uint8))
    bias = kept[f"{gate}.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, tensors[f"{gate}.e_score_correction_bias"])
    assert kept[f"{gate}.weight"].dtype == torch.float32


def test_a_layer_that_predicts_further_tokens_is_left_out_with_the_reason(coded: Path) -> None:
    plan = prepare(str(coded), LoadOptions()).plan
    behind = {row.name for row in tensor_table(TINY) if ".layers.2." in row.name}
    assert set(plan.dropped) == behind
    assert set(plan.dropped.values()) == {"layer 2 lies beyond num_hidden_layers = 2"}


def test_the_cache_keeps_one_latent_a_token_and_takes_no_other_form(coded: Path) -> None:
    prepared = prepare(str(coded), LoadOptions(max_model_len=100))
    assert prepared.budget.cache_nbytes == 2 * 100 * (64 + 16) * 2  # layers, tokens, numbers, bfloat16
    assert kv_cache_nbytes(prepared.config, max_tokens=100, dtype=prepared.dtype) == prepared.budget.cache_nbytes
    with pytest.raises(OptionError, match=re.escape("--kv-cache-dtype int8: a KV cache of dtype int8 is not possible")):
        prepare(str(coded), LoadOptions(kv_cache_dtype="int8"))


def test_tokens_one_by_one_are_those_of_the_prompt_at_once(coded: Path) -> None:
    with LLM(str(coded), dtype="float32", kernels="exact") as llm:
        (made,) = llm.complete([IDS], SamplingParams(max_tokens=6, temperature=0.0))
        ids = [*IDS, *made.token_ids]
        assert ids[len(IDS) :] == llm.logits(ids[:-1])[len(IDS) - 1 :].argmax(-1).tolist()


def test_experts_of_a_model_without_sparse_layers_have_no_home(coded: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "dense", {"model.layers.0.mlp.experts.down_proj": torch.ones(2, 3, 4)}, quantized=False)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "first_k_dense_replace": 9}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.down_proj in model\.safetensors: no parameter"):
        prepare(str(folder), LoadOptions())


def test_a_quantized_folder_says_what_stays_wide(tmp_path: Path) -> None:
    wide = {name: tensor.bfloat16() for name, tensor in widened(tensors_of(TINY)).items()}
    folder = write(tmp_path / "wide", wide, quantized=False)
    assert cli.run(["quantize", str(folder), str(tmp_path / "out"), "--quantization", "fp8_per_channel"]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    ups = [f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(2)]
    assert config["quantization_config"]["ignore"] == [*ups, "model.layers.1.mlp.gate", "lm_head"]


@pytest.mark.slow
def test_the_true_models_plan_fits_in_a_gibibyte(tmp_path: Path) -> None:
    write_index(tmp_path, DeepSeek())
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    used, dropped, read_nbytes, peak_kib = map(int, done.stdout.split())
    table = list(tensor_table(DeepSeek()))
    behind = [row for row in table if ".layers.61." in row.name]
    assert (used, dropped) == (len(table) - len(behind), len(behind))
    assert read_nbytes == sum(row.nbytes for row in table) - sum(row.nbytes for row in behind)
    assert peak_kib < 1 << 20
