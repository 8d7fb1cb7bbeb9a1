"""The account at the load's end: every row once; and the bytes: read as planned, or not used for a reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from streaming import LLM
from streaming.accounts import Accounts
from streaming.cli import run
from streaming.errors import LayerLoadError
from streaming.options import LoadOptions
from streaming.plan import LoadItem, LoadPlan
from streaming.prepare import prepare
from streaming.read_plan import plan_reads
from tests.streaming.checkpoint.build import write_gguf
from tests.streaming.planned import plan_of, specs_of

IDS = [3, 17, 39, 4]
ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"
PLAN = plan_of(TinyModel(layers=2), item_nbytes=2000)


def account_of(plan: LoadPlan, items: Iterable[LoadItem]) -> Accounts:
    accounts = Accounts(specs_of(plan))
    for item in items:
        accounts.note(item)
    return accounts


def test_a_whole_load_is_in_order_in_whatever_order_it_came() -> None:
    account_of(PLAN, PLAN.items).check()
    account_of(PLAN, reversed(PLAN.items)).check()


@pytest.mark.parametrize("left_out", range(len(PLAN.items)))
def test_every_item_that_did_not_come_is_noticed(left_out: int) -> None:
    item = PLAN.items[left_out]
    accounts = account_of(PLAN, (other for other in PLAN.items if other is not item))
    with pytest.raises(LayerLoadError) as caught:
        accounts.check()
    first = sum(item.param.section_rows[: item.section])
    rows = f"rows {first + item.section_rows[0]} to {first + item.section_rows[1]}"
    where = f"layer {item.layer}, stage account, tensor {item.param.name}"
    assert str(caught.value) == f"{where}: {rows} were never filled"


def test_rows_that_come_twice_are_noticed() -> None:
    item = next(item for item in PLAN.items if "q_proj" in item.tensor.name and item.section_rows[0] > 0)
    accounts = account_of(PLAN, PLAN.items)
    start, stop = item.section_rows
    with pytest.raises(LayerLoadError, match=rf"rows {start + 1} to {stop} of {item.param.name} come twice"):
        accounts.note(replace(item, section_rows=(start + 1, stop)))


def test_a_layer_is_asked_for_by_itself() -> None:
    accounts = account_of(PLAN, (item for item in PLAN.items if item.layer == "layers.1"))
    accounts.check("layers.1")
    with pytest.raises(LayerLoadError, match=r"layer layers\.0, stage account"):
        accounts.check("layers.0")


def test_a_load_that_leaves_rows_out_fails(tiny_folder: Callable[[TinyModel], Path]) -> None:
    """A plan that forgets the table: its memory must not be taken for weights."""
    prepared = prepare(str(tiny_folder(TinyModel(layers=1))), LoadOptions())
    *layers, table = prepared.plan.layers
    assert table.name == "embed"
    plan = replace(prepared.plan, layers=(*layers, replace(table, items=())))
    forgetful = replace(prepared, plan=plan, read_plan=plan_reads(plan, window_nbytes=1 << 20))
    words = r"layer embed, stage account.*rows 0 to 160 were never filled"
    with pytest.raises(LayerLoadError, match=words), LLM.start(forgetful) as llm:
        llm.wait_loaded()


# --- bytes ----------------------------------------------------------------------------------------------------------


def as_safetensors(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    save_file(weights | {ROTARY: torch.ones(8)}, folder / "model.safetensors")
    return folder


def as_pickle(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    views = {name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in weights.items()}
    torch.save(views | {ROTARY: torch.ones(8)}, folder / "pytorch_model.bin")
    return folder


def as_gguf(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    return write_gguf(folder / "model.gguf")


@pytest.mark.parametrize("write", [as_safetensors, as_pickle, as_gguf])
@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
def test_the_bytes_read_are_the_plans_and_the_unused_ones_are_not_among_them(
    write: Callable[[Path, dict[str, torch.Tensor]], Path],
    quantization: str,
    tiny_folder: Callable[[TinyModel], Path],
    tmp_path: Path,
) -> None:
    plain = tiny_folder(TinyModel(layers=2, files=1))
    weights = load_file(plain / "model.safetensors")
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    with LLM(write(tmp_path, weights), quantization=quantization) as llm:
        llm.logits(IDS)
        llm.wait_loaded()
        stats, prepared = llm.stats(), llm.prepared
    assert stats.bytes_read == prepared.plan.read_nbytes
    assert stats.bytes_read + sum(prepared.plan.unused.values()) == prepared.checkpoint.nbytes
    assert stats.bytes_rows > 0


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_plan_and_inspect_list_what_is_not_used(
    command: str, tiny_folder: Callable[[TinyModel], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = tiny_folder(TinyModel(layers=2, files=1))
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    folder = as_safetensors(tmp_path, load_file(plain / "model.safetensors"))
    reason = "a rotary table, which the configuration determines"
    assert run([command, str(folder), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["dropped"], found["bytes_unused"]) == ({ROTARY: reason}, {reason: 32})
    assert run([command, str(folder)]) == 0
    assert reason in capfd.readouterr().out
