"""`--moe-load routed_first`: the same bits as whole layers, and before the first token only the experts it needs."""

from __future__ import annotations

import json
import shutil
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from layers.sampling_params import SamplingParams
from quant.device_features import DeviceFeatures
from streaming import LLM, StreamClosedError, cli
from streaming.errors import LayerLoadError, OptionError
from streaming.expert_plan import with_experts_apart
from streaming.item_bytes import ItemBytes
from streaming.load_plan import LoadItem
from streaming.options import LoadOptions
from streaming.prepare import prepare
from tests.layers.family_cases import FAMILY_CASES
from tests.streaming.leftovers import nothing_left
from tests.streaming.ranks.threaded import open_ranked
from tests.streaming.remote.range_server import serving
from tests.streaming.test_cuda_device import FakeCuda
from tests.streaming.test_cuda_device import cuda as cuda
from tests.streaming.waiting import SOON_S, in_background, until
from tests.test_against_transformers import write_checkpoint

IDS = [5, 9, 2, 7, 11, 3, 17, 4, 23, 8, 31, 6, 1, 13, 19, 29]
EXPERTS, CHOSEN, INNER, HIDDEN = 128, 8, 16, 64
SPARSE = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a family's small model, written by transformers when it is first asked for; "many" is a qwen3_moe
    of two layers with 128 experts, of which 8 are chosen."""
    root, written = tmp_path_factory.mktemp("sparse"), set[str]()

    def of(name: str) -> Path:
        if name not in written:
            family, changes = ("qwen3_moe", _MANY) if name == "many" else FAMILY_CASES[name]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                write_checkpoint(import_module("transformers"), family, changes, folder=root / name)
            written.add(name)
        return root / name

    return of


_MANY = {
    "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": INNER, "hidden_size": HIDDEN,
    "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 160, "norm_topk_prob": True,
}  # fmt: skip


def kept_of(llm: LLM) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in llm.shell.named_parameters()}


def loaded(folder: Path, ids: Sequence[int] = IDS, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Logits while it loads, everything that is kept once it is loaded, and bytes read."""
    with LLM(folder, reader="threads", **options) as llm:
        logits = llm.logits(ids)
        llm.wait_loaded()
        return logits, kept_of(llm), llm.stats().bytes_read


def assert_same(folder: Path, **options: Any) -> None:
    expected, kept, nbytes = loaded(folder, **options)
    logits, found, read = loaded(folder, moe_load="routed_first", **options)
    assert torch.equal(logits, expected)
    assert found.keys() == kept.keys()
    different = [name for name in kept if not torch.equal(_bytes(found[name]), _bytes(kept[name]))]
    assert different == []
    assert read == nbytes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


class HeldReads:
    """Experts are read once the test lets them; what is asked for is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go_on, self.asked = threading.Event(), threading.Event(), list[str]()
        self._read = ItemBytes.read
        monkeypatch.setattr(ItemBytes, "read", lambda items, item, into: self._held(items, item, into))

    def _held(self, items: ItemBytes, item: LoadItem, into: torch.Tensor | None) -> torch.Tensor:
        self.asked.append(item.tensor.name)
        self.entered.set()
        assert self.go_on.wait(SOON_S)
        return self._read(items, item, into)


# --- the same bits


@pytest.mark.parametrize("family", SPARSE)
def test_experts_that_come_when_they_are_routed_to_give_the_bits_of_whole_layers(family: str, folder: Folder) -> None:
    assert_same(folder(family), dtype="bfloat16")


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "int8_per_channel", "int4_per_group", "nvfp4"])
def test_quantized_experts_do_not_depend_on_the_order_in_which_they_come(scheme: str, folder: Folder) -> None:
    assert_same(folder("qwen3_moe"), quantization=scheme)


def test_maps_and_made_up_weights_have_experts_too(folder: Folder) -> None:
    assert_same(folder("qwen3_moe"), safetensors_load_strategy="lazy")
    assert_same(folder("qwen3_moe"), load_format="dummy")


def test_experts_come_over_a_page_locked_device_and_from_an_address(
    folder: Folder, cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLAYER_CACHE", str(tmp_path))
    expected, _, nbytes = loaded(folder("qwen3_moe"), quantization="int8_per_channel")
    with LLM(folder("qwen3_moe"), moe_load="routed_first", device="cuda", quantization="int8_per_channel") as llm:
        assert torch.equal(llm.logits(IDS), expected)
        llm.wait_loaded()
        assert llm.stats().bytes_read == nbytes
    assert cuda.names().count("awaited") >= len(llm.prepared.plan.all_items)
    options = {"moe_load": "routed_first", "quantization": "int8_per_channel"}
    with serving(folder("qwen3_moe")) as server, LLM(server.url, **options) as llm:  # type: ignore[arg-type]
        assert torch.equal(llm.logits(IDS), expected)
        llm.wait_loaded()
        assert llm.stats().bytes_read == nbytes


def test_answers_are_those_of_whole_layers(folder: Folder) -> None:
    answers = []
    for order in ("layers", "routed_first"):
        with LLM(folder("qwen3_moe"), moe_load=order, reader="threads") as llm:
            params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
            answers.append([answer.token_ids for answer in llm.complete([IDS, IDS[:3]], params)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "mesh", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}]
)
def test_every_rank_loads_the_experts_that_its_tokens_need(mesh: dict[str, Any], folder: Folder) -> None:
    with open_ranked(folder("qwen3_moe"), **mesh) as ranked:
        expected = ranked.logits(IDS)
    with open_ranked(folder("qwen3_moe"), moe_load="routed_first", **mesh) as ranked:
        found = ranked.logits(IDS)
        assert ranked.model.wait_loaded(SOON_S)
        again = ranked.logits(IDS)
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("scheme", ["none", "fp8_per_tensor", "int4_per_group", "nvfp4"])
def test_shards_that_hold_all_experts_as_one_are_read_expert_by_expert(
    scheme: str, folder: Folder, tmp_path: Path
) -> None:
    with LLM(folder("qwen3_moe"), quantization=scheme, reader="threads") as llm:
        expected = llm.logits(IDS)
    out = ["--out", str(tmp_path / "saved"), "--quiet", "--reader", "threads"]
    assert cli.run(["save-shards", str(folder("qwen3_moe")), *out, "--quantization", scheme]) == 0
    assert_same(tmp_path / "saved")
    assert torch.equal(loaded(tmp_path / "saved", moe_load="routed_first")[0], expected)
    plan = prepare(str(tmp_path / "saved"), LoadOptions(moe_load="routed_first")).plan
    assert [len(one.units) for one in plan.experts] == [7, 7]
    assert all(item.direct for one in plan.experts for item in one.plan.items)


# --- what is read when


def test_before_the_first_token_comes_what_its_routers_choose(folder: Folder) -> None:
    chosen = chosen_by_transformers(folder("many"))
    with LLM(folder("many"), moe_load="routed_first", reader="threads", dtype="float32") as llm:
        held = llm.prepared.plan
        llm.complete([IDS], SamplingParams(max_tokens=1, temperature=0.0))
        before = llm.stats().bytes_before_first_token
        llm.wait_loaded()
        rows, read = llm.stats().bytes_rows, llm.stats().bytes_read
    one, table = 3 * INNER * HIDDEN * 4, 160 * HIDDEN * 4
    base = held.read_nbytes - 2 * EXPERTS * one
    assert rows == len(IDS) * HIDDEN * 4
    assert before in (rows + base + sum(chosen) * one, rows + base - table + sum(chosen) * one)  # the table comes last
    assert read == held.read_nbytes
    with LLM(folder("many"), reader="threads", dtype="float32") as llm:
        llm.complete([IDS], SamplingParams(max_tokens=1, temperature=0.0))
        whole = llm.stats().bytes_before_first_token
    assert whole in (rows + read, rows + read - table)


def chosen_by_transformers(folder: Path) -> list[int]:
    """How many experts of each layer the prompt's tokens are routed to."""
    model = import_module("transformers").AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[int] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda module, inputs, outputs: found.append(
                len((inputs[0] @ module.weight.T).topk(CHOSEN).indices.unique())
            )
        )
    with torch.no_grad():
        model(torch.tensor([IDS]))
    return found


def test_a_layer_is_ready_before_its_experts_and_the_load_is_over_after_them(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = HeldReads(monkeypatch)
    with LLM(folder("qwen3_moe"), moe_load="routed_first", reader="threads") as llm:
        assert llm.wait_ready(0, SOON_S)
        assert list(llm.readiness)[:3] == ["embed", "layers.0", "layers.0.experts"]
        assert not llm.wait_ready("layers.0.experts", timeout=0)
        assert llm.stats().load_done_s is None
        reads.go_on.set()
        llm.wait_loaded()
        assert {state.value for state in llm.readiness.values()} == {"ready"}


def test_nothing_but_what_a_first_pass_needs_is_read_while_it_runs(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = HeldReads(monkeypatch)
    with LLM(folder("many"), moe_load="routed_first", reader="threads") as llm:
        logits = in_background(lambda: llm.logits(IDS[:1]))
        assert reads.entered.wait(SOON_S)
        until(lambda: llm.readiness["embed"].value == "ready")
        asked = set(reads.asked)
        assert {name.split(".")[2] for name in asked} == {"0"}
        assert len({name.split(".experts.")[1].split(".")[0] for name in asked}) <= CHOSEN
        reads.go_on.set()
        assert logits.result(SOON_S).shape == (1, 160)


# --- what goes wrong


def test_closing_ends_a_fetch_that_is_under_way(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(folder("qwen3_moe"))  # what torch keeps for good is there after the first time
    reads = HeldReads(monkeypatch)
    with nothing_left():
        _close_while_reading(folder("qwen3_moe"), reads)


def _close_while_reading(folder: Path, reads: HeldReads) -> None:
    llm = LLM(folder, moe_load="routed_first", reader="threads")
    waiting = in_background(lambda: llm.logits(IDS))
    assert reads.entered.wait(SOON_S)
    closing = in_background(llm.close)
    with pytest.raises(StreamClosedError, match=r"was closed while layer layers\.0\.experts was awaited"):
        waiting.result(SOON_S)
    reads.go_on.set()
    closing.result(SOON_S)


def test_an_expert_that_is_not_a_number_ends_a_checked_load_by_name(folder: Folder, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors = load_file(folder("qwen3_moe") / "model.safetensors")
    tensors[name].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(folder("qwen3_moe") / "config.json", tmp_path)
    words = f"layer layers.1.experts, stage check, tensor {name}: .* holds NaN"
    with pytest.raises(LayerLoadError, match=words), routed_first(tmp_path, check_weights=True) as llm:
        llm.wait_loaded()
    with routed_first(tmp_path) as llm:
        llm.wait_loaded()
        assert [text.partition(" in ")[0] for text in llm.stats().warnings if "NaN" in text] == [name]


def routed_first(folder: Path, **options: Any) -> LLM:
    return LLM(folder, moe_load="routed_first", reader="threads", **options)


def test_a_file_that_is_changed_behind_the_plan_is_named_by_whoever_waits(folder: Folder, tmp_path: Path) -> None:
    tensors = load_file(folder("qwen3_moe") / "model.safetensors")
    apart = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
    save_file(tensors, tmp_path / "model-1.safetensors")
    save_file(apart, tmp_path / "model-2.safetensors")
    places = dict.fromkeys(tensors, "model-1.safetensors") | dict.fromkeys(apart, "model-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    shutil.copy(folder("qwen3_moe") / "config.json", tmp_path)
    prepared = prepare(str(tmp_path), LoadOptions(moe_load="routed_first", reader="threads"))
    with (tmp_path / "model-2.safetensors").open("r+b") as file:
        file.truncate(4000)
    words = r"layer layers\.0\.experts, stage read, tensor .*model-2"
    with pytest.raises(LayerLoadError, match=words), LLM.start(prepared) as llm:
        llm.logits(IDS)


# --- the plan


def test_the_parts_of_the_plan_are_the_plan(folder: Folder) -> None:
    whole = prepare(str(folder("deepseek_v3")), LoadOptions()).plan
    apart = prepare(str(folder("deepseek_v3")), LoadOptions(moe_load="routed_first")).plan
    assert apart.read_nbytes == whole.read_nbytes
    assert apart.kept_nbytes == whole.kept_nbytes
    assert [item.index for item in apart.items] == list(range(len(apart.items)))
    bytes_of = [sorted((i.tensor.file, i.file_offset, i.nbytes) for i in plan.all_items) for plan in (whole, apart)]
    assert bytes_of[0] == bytes_of[1]
    assert not any(".experts." in item.param.name for item in apart.items if not item.param.name.endswith("bias"))


def test_each_expert_is_a_unit_where_its_tensors_are_its_own(folder: Folder) -> None:
    plan = prepare(str(folder("many")), LoadOptions(moe_load="routed_first")).plan
    assert [(one.of, one.plan.name, len(one.units)) for one in plan.experts] == [
        ("layers.0", "layers.0.experts", EXPERTS), ("layers.1", "layers.1.experts", EXPERTS),
    ]  # fmt: skip
    first = plan.experts[0]
    names = [item.tensor.name for item in first.items_of(first.unit_of(77))]
    assert names == [f"model.layers.0.mlp.experts.77.{part}_proj.weight" for part in ("gate", "up", "down")]


def test_what_is_read_to_be_quantized_is_in_the_budget_for_each_thread(folder: Folder) -> None:
    whole, apart = (
        prepare(str(folder("many")), LoadOptions(moe_load=order, quantization="int8_per_channel")).budget
        for order in ("layers", "routed_first")
    )
    assert apart.convert_nbytes - whole.convert_nbytes == 4 * INNER * HIDDEN * 4
    assert apart.kept_nbytes == whole.kept_nbytes


def test_what_cannot_be_loaded_by_experts_is_refused_in_words(folder: Folder) -> None:
    plan = prepare(str(folder("qwen3_moe")), LoadOptions()).plan
    for words, options in (
        ("--safetensors-load-strategy eager, which reads whole files", {"safetensors_load_strategy": "eager"}),
        ("--load-format runai_streamer, whose package", {"load_format": "runai_streamer"}),
        ("--remote-cache, which fetches whole files", {"remote_cache": "copies"}),
    ):
        with pytest.raises(OptionError, match=f"--moe-load routed_first does not go with {words}"):
            with_experts_apart(plan, LoadOptions(moe_load="routed_first", **options))
    torn = LoadOptions(moe_load="routed_first", tensor_parallel_size=2, quantization="fp8_per_tensor")
    with pytest.raises(OptionError, match=r"agree on scales .*--enable-expert-parallel keeps each expert on one rank"):
        prepare(str(folder("qwen3_moe")), torn)
    with pytest.raises(OptionError, match="--moe-load 'last' is not known: choose one of layers, routed_first"):
        LoadOptions(moe_load="last")


def test_experts_that_a_device_processes_as_a_whole_are_refused(
    folder: Folder, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceFeatures, "detect", lambda *_device, **_how: DeviceFeatures(fnuz=True))
    words = "on cuda the experts of layers.0 are processed once they are whole; leave the option out"
    with pytest.raises(OptionError, match=words):
        LLM(folder("qwen3_moe"), moe_load="routed_first", device="cuda", quantization="fp8_per_channel")


def test_a_model_without_experts_is_loaded_by_layers_with_a_warning(four_layers: Path) -> None:
    prepared = prepare(str(four_layers), LoadOptions(moe_load="routed_first"))
    assert prepared.plan.experts == ()
    assert "--moe-load routed_first: the model has no experts, so it is loaded layer by layer" in prepared.warnings
