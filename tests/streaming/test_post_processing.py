"""Post-processing in the pipeline: layer by layer, before a layer is seen, never twice, and not on a CPU.

A device of e4m3fnuz is made of this machine: it is asked for its features and has them; what it computes with the
processed weights is what a CPU computes with those on disk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.write_tiny_model import TinyModel
from quant.device_features import DeviceFeatures
from quant.processed_scheme import Processed
from streaming import LLM, LayerLoadError, LoadOptions, OptionError, SamplingParams, cli, device
from streaming.kv_scales import scales_on_device
from streaming.one_layer import load_one_layer
from streaming.post_processing import PostProcessing, plan_processing
from streaming.prepare import Prepared, prepare
from tests.streaming.coded import write_coded
from tests.streaming.test_cuda_device import FakeCuda, cuda
from tests.streaming.test_fp8_on_disk import FP8, in_blocks
from tests.test_against_transformers import write_checkpoint

__all__ = ["cuda"]  # a fixture
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
IDS = [5, 9, 7, 21]
FNUZ = DeviceFeatures(fnuz=True)
MODEL = TinyModel(layers=2)
Folders = Callable[[TinyModel], Path]


@pytest.fixture
def fnuz(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The recorded device, as one of e4m3fnuz; it is told from the CPU by having a number."""

    def detect(found: torch.device, *, triton: bool) -> DeviceFeatures:
        return DeviceFeatures() if found.index is None else FNUZ

    monkeypatch.setattr(device, "cuda_device", lambda _name: torch.device("cpu", 0))
    monkeypatch.setattr(DeviceFeatures, "detect", detect)
    return cuda


def note(monkeypatch: pytest.MonkeyPatch, order: list[str], target: str, layer_of: Callable[..., str]) -> None:
    """Write down when a function has been called, and for which layer."""
    owner, _, name = target.rpartition(".")
    module, _, last = owner.rpartition(".")
    holder = getattr(import_module(module), last) if last[0].isupper() else import_module(owner)
    real = getattr(holder, name)

    def noted(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        order.append(f"{name} {layer_of(*arguments, **options)}")
        return found

    monkeypatch.setattr(holder, name, noted)


def post_processing_spans(llm: LLM) -> list[str]:
    return [span.name for span in llm._model.tracer.spans() if span.lane == "post-process"]


def kept_of(llm: LLM) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in llm.shell.named_parameters()}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of three experts."""
    changes = {
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16, "vocab_size": 160,
        "num_hidden_layers": 2,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("sparse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_checkpoint(import_module("transformers"), "qwen3_moe", changes, folder=folder)
    return folder


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"])
def test_a_device_of_e4m3fnuz_computes_what_a_cpu_computes(
    kind: str, scheme: str, sparse: Path, tiny_folder: Folders, fnuz: FakeCuda
) -> None:
    folder = sparse if kind == "sparse" else tiny_folder(MODEL)
    with LLM(folder, quantization=scheme, quantize_head=True) as llm:
        llm.wait_loaded()
        expected, plain = llm.logits(IDS), kept_of(llm)
    with LLM(folder, device="cuda", quantization=scheme, quantize_head=True) as llm:
        assert torch.equal(llm.logits(IDS), expected)
        llm.wait_loaded()
        found, spans = kept_of(llm), post_processing_spans(llm)
        assert llm.stats().stages["post-process"] > 0
    assert spans == ["layers.0", "layers.1", "head"]  # once each, in the order of use
    processed = {name for name, tensor in plain.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(processed) == 2 * 4 + 1
    for name, tensor in found.items():
        if name in processed:
            assert tensor.dtype == torch.float8_e4m3fnuz
            assert torch.equal(found[f"{name}_scale"], 2 * plain[f"{name}_scale"])
        elif name.removesuffix("_scale") not in processed:
            assert torch.equal(tensor, plain[name])


def test_weights_that_were_float8_on_disk_keep_their_runs(tmp_path: Path, fnuz: FakeCuda) -> None:
    config = {**FP8, "weight_block_size": [48, 20]}
    model = TinyModel(layers=1, family="phi3")  # q, k and v are one on disk, with their edges inside blocks
    coded, _ = write_coded(tmp_path, in_blocks(48, 20, torch.float32), config=config, model=model)
    with LLM(coded) as llm:
        expected = llm.logits(IDS)
    with LLM(coded, device="cuda") as llm:
        assert torch.equal(llm.logits(IDS), expected)
        llm.wait_loaded()
        assert kept_of(llm)["model.layers.0.self_attn.qkv_proj.weight"].dtype == torch.float8_e4m3fnuz


@pytest.mark.parametrize("scheme", ["none", "int8_per_channel", "mxfp8", "nvfp4"])
def test_what_no_product_of_the_device_reads_stays_as_it_is(scheme: str, tiny_folder: Folders, fnuz: FakeCuda) -> None:
    with LLM(tiny_folder(MODEL), quantization=scheme) as llm:
        expected = llm.logits(IDS)
    with LLM(tiny_folder(MODEL), device="cuda", quantization=scheme) as llm:
        assert torch.equal(llm.logits(IDS), expected)
        llm.wait_loaded()
        assert post_processing_spans(llm) == []


def test_a_layer_is_processed_behind_its_last_weight_and_before_anyone_has_it(
    tiny_folder: Folders, fnuz: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    note(monkeypatch, order, "streaming.item_storing.store_item", lambda item, *_: item.layer)
    note(monkeypatch, order, "streaming.post_processing.PostProcessing.process", lambda _self, _s, spec: spec.name)
    note(monkeypatch, order, "streaming.residency.Residency.publish", lambda _self, layer, **_: layer)
    with LLM(tiny_folder(MODEL), device="cuda", quantization="fp8_per_channel") as llm:
        llm.wait_loaded()
    for layer in ("layers.0", "layers.1"):
        found = [entry.partition(" ")[0] for entry in order if entry.endswith(f" {layer}")]
        assert found[-3:] == ["store_item", "process", "publish"]
        assert found.count("process") == found.count("publish") == 1


def test_a_layer_that_cannot_be_processed_is_named_with_the_stage(
    tiny_folder: Folders, fnuz: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_arguments: Any) -> None:
        raise RuntimeError("it broke")

    monkeypatch.setattr(PostProcessing, "process", fail)
    with (
        pytest.raises(LayerLoadError, match="it broke") as caught,
        LLM(tiny_folder(MODEL), device="cuda", quantization="fp8_per_channel") as llm,
    ):
        llm.complete([IDS], PARAMS)
    assert (caught.value.layer, caught.value.stage) == ("layers.0", "post-process")


def test_shards_hold_the_form_before_it_and_are_processed_once(
    tmp_path: Path, tiny_folder: Folders, fnuz: FakeCuda
) -> None:
    folder, saved = str(tiny_folder(MODEL)), []
    for name in ("cpu", "cuda"):
        out = tmp_path / name
        options = ["--out", str(out), "--quantization", "fp8_per_channel", "--device", name, "--quiet"]
        assert cli.run(["save-shards", folder, *options]) == 0
        saved.append((out / "model-rank-00000-part-00000.safetensors").read_bytes())
    assert saved[0] == saved[1]
    with LLM(folder, quantization="fp8_per_channel") as llm:
        expected = llm.logits(IDS)
    with LLM(tmp_path / "cuda", device="cuda") as llm:
        assert torch.equal(llm.logits(IDS), expected)
        assert post_processing_spans(llm) == ["layers.0", "layers.1"]


def test_one_layer_is_loaded_in_the_form_that_files_hold(tiny_folder: Folders, fnuz: FakeCuda) -> None:
    prepared = prepare(str(tiny_folder(MODEL)), LoadOptions(quantization="fp8_per_channel", device="cuda"))
    tensors = load_one_layer(prepared, 0)
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn


def test_verify_compares_what_files_hold(tiny_folder: Folders, fnuz: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Prepared] = []

    def start(prepared: Prepared, **_rest: Any) -> None:
        started.append(prepared)
        raise OptionError("that is all")

    monkeypatch.setattr(LLM, "start", start)
    assert cli.run(["verify", str(tiny_folder(MODEL)), "--device", "cuda", "--quiet"]) == 2
    assert [prepared.post_process for prepared in started] == [False]


def test_an_fp8_cache_is_in_e4m3fnuz_under_doubled_scales(tiny_folder: Folders, fnuz: FakeCuda) -> None:
    with LLM(tiny_folder(MODEL), kv_cache_dtype="fp8") as llm:
        expected = llm.logits(IDS)
    with LLM(tiny_folder(MODEL), device="cuda", kv_cache_dtype="fp8") as llm:
        assert torch.equal(llm.logits(IDS), expected)
        cache = llm._model.new_cache(4)
        assert cache._kept["codes"].dtype == torch.float8_e4m3fnuz


def test_only_the_scales_of_an_fp8_cache_double(tiny_folder: Folders) -> None:
    config, scales = prepare(str(tiny_folder(MODEL)), LoadOptions()).config, ((0.5, 1.0), (3.0, 1.0))
    assert scales_on_device(scales, cache_dtype="fp8_e4m3", config=config, fnuz=True) == ((1.0, 2.0), (6.0, 2.0))
    assert scales_on_device(None, cache_dtype="fp8", config=config, fnuz=True) == ((2.0, 2.0), (2.0, 2.0))
    assert scales_on_device(scales, cache_dtype="fp8", config=config, fnuz=False) is scales
    for other in ("auto", "int8", "int4"):
        assert scales_on_device(None, cache_dtype=other, config=config, fnuz=True) is None


def test_steps_are_planned_for_weights_alone(tiny_folder: Folders) -> None:
    specs = prepare(str(tiny_folder(MODEL)), LoadOptions(quantization="fp8_per_channel")).specs
    planned = plan_processing(specs, FNUZ)
    leaves = {name.rpartition(".")[0].rpartition(".")[2] for name in planned.steps}
    assert leaves == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert len(planned.steps) == 2 * 4
    assert plan_processing(specs, DeviceFeatures((9, 0), True)).steps == {}
    params = {param.name: param for spec in planned.shell_specs(specs) for param in spec.params}
    assert {name for name, param in params.items() if isinstance(param.scheme, Processed)} == set(planned.steps)
    assert all(planned.due(spec) is spec.name.startswith("layers.") for spec in specs)
