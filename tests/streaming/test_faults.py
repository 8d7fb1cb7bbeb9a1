"""A failure in each stage: one LayerLoadError that names layer, stage and tensor, for whoever waits; nothing left."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel, write_tiny_model
from streaming import LLM, Hooks, LayerLoadError, LayerState, SamplingParams, WorkerError, open_llm
from streaming.errors import CheckpointError, StreamingError
from streaming.plan import LoadItem
from streaming.prepare import Prepared
from streaming.reader import ProcessReader, ThreadReader
from streaming.stages import slice_item, store_item
from tests.streaming.gates import Gate, GatedReader, gated_llm, reading_with
from tests.streaming.leftovers import nothing_left
from tests.streaming.waiting import SOON_S, in_background

IDS = [5, 9, 2, 7]
TENSOR = "model.layers.1.self_attn.o_proj.weight"


@dataclass(frozen=True)
class Fault:
    """Something goes wrong with TENSOR (the layer as a whole, for publish) in one stage."""

    stage: str
    words: str
    arrange: Callable[[pytest.MonkeyPatch], None]


def failing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def reader(prepared: Prepared) -> ThreadReader:
        def before(piece: int) -> None:
            if prepared.plan.items[prepared.read_plan.pieces[piece].item].tensor.name == TENSOR:
                raise OSError(errno.EIO, "ignored: the number says it")

        return ThreadReader(prepared.read_plan, before=before)

    monkeypatch.setattr("streaming.llm.start_reader", reader)


def failing_function(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def arrange(monkeypatch: pytest.MonkeyPatch) -> None:
        import streaming.item_storing

        function = getattr(streaming.item_storing, name)

        def fail(item: LoadItem, *rest: Any) -> Any:
            if item.tensor.name == TENSOR:
                raise RuntimeError("it broke")
            return function(item, *rest)

        monkeypatch.setattr(f"streaming.item_storing.{name}", fail)

    return arrange


def failing_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    from streaming.residency import Residency

    publish = Residency.publish

    def fail(self: Residency, layer: str, *, event: Any = None) -> None:
        if layer == "layers.1":
            raise RuntimeError("it broke")
        publish(self, layer, event=event)

    monkeypatch.setattr(Residency, "publish", fail)


FAULTS = [
    Fault("read", "{folder}/model-00002-of-00002.safetensors: Input/output error", failing_read),
    Fault("slice", "RuntimeError: it broke", failing_function("slice_item")),
    Fault("quantize", "RuntimeError: it broke", failing_function("store_item")),
]
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.stage)


@pytest.fixture
def folder(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    """Three layers; float32 from bfloat16 takes every item through the window."""
    return tiny_folder(TinyModel(layers=3))


def is_the_fault(error: BaseException | None, fault: Fault, folder: Path) -> bool:
    assert isinstance(error, LayerLoadError), repr(error)
    file = next(f for f in sorted(folder.glob("*.safetensors")) if TENSOR.encode() in f.read_bytes())
    words = fault.words.replace("{folder}/model-00002-of-00002.safetensors", str(file))
    return (error.layer, error.stage, error.tensor, str(error)) == (
        "layers.1", fault.stage, TENSOR, f"layer layers.1, stage {fault.stage}, tensor {TENSOR}: {words}",
    )  # fmt: skip


def tokens(llm: LLM) -> list[int]:
    return [piece.token_id for piece in llm.pieces([IDS], SamplingParams(max_tokens=2, ignore_eos=True))]


def one_failed_run(folder: Path) -> BaseException:
    with pytest.raises(Exception) as caught, LLM(folder, dtype="float32") as llm:
        tokens(llm)
    return caught.value


# --- who is told ----------------------------------------------------------------------------------------------------


@each_fault
def test_a_generation_that_waits_is_given_the_error(
    fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.arrange(monkeypatch)
    assert is_the_fault(one_failed_run(folder), fault, folder)


@each_fault
def test_whoever_waits_for_a_layer_is_given_the_error(
    fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.arrange(monkeypatch)
    with pytest.raises(LayerLoadError) as caught, LLM(folder, dtype="float32") as llm:  # noqa: PT012
        assert llm.wait_ready(0) is True
        llm.wait_ready("head")
    assert is_the_fault(caught.value, fault, folder)


@each_fault
def test_an_error_that_was_seen_is_not_raised_again_at_the_end(
    fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.arrange(monkeypatch)
    with LLM(folder, dtype="float32") as llm:
        with pytest.raises(LayerLoadError):
            tokens(llm)
        assert llm.readiness["layers.1"] is not LayerState.READY


@each_fault
def test_an_error_that_nobody_saw_is_raised_at_the_end_of_the_block(
    fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.arrange(monkeypatch)

    import streaming.llm

    async def main() -> None:
        async with open_llm(folder, dtype="float32", reader_of=streaming.llm.start_reader) as llm:
            while llm.model.residency.error is None:
                await anyio.lowlevel.checkpoint()

    with pytest.raises(LayerLoadError) as caught:
        anyio.run(main)
    assert is_the_fault(caught.value, fault, folder)


@each_fault
def test_every_later_call_is_given_the_same_error(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.arrange(monkeypatch)
    errors = []
    with pytest.raises(LayerLoadError), LLM(folder, dtype="float32") as llm:  # noqa: PT012
        for call in (lambda: tokens(llm), lambda: llm.logits(IDS), lambda: llm.wait_ready(2), llm.wait_loaded):
            with pytest.raises(LayerLoadError) as caught:
                call()
            errors.append(caught.value)
        raise errors[0]
    assert all(is_the_fault(error, fault, folder) for error in errors)


@each_fault
def test_nothing_is_left_after_a_failure(fault: Fault, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.arrange(monkeypatch)
    one_failed_run(folder)  # what torch and the libraries keep for good is there now
    with nothing_left():
        one_failed_run(folder)


def test_a_failure_while_publishing_names_its_stage_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_publish(monkeypatch)
    error = one_failed_run(folder)
    assert isinstance(error, LayerLoadError)
    assert (error.layer, error.stage) == ("layers.1", "publish")
    assert error.tensor == "model.layers.1.mlp.down_proj.weight"  # the layer's last item
    assert str(error).endswith("RuntimeError: it broke")


def test_a_users_callback_that_fails_is_a_failure_of_publishing(folder: Path) -> None:
    def fail(layer: str, state: LayerState) -> None:
        if state is LayerState.READY:
            raise ZeroDivisionError(f"{layer} is ready")

    gate = Gate()
    with pytest.raises(LayerLoadError, match=r"publish.*ZeroDivisionError"), gated_llm(folder, gate) as llm:  # noqa: PT012
        llm.on_change(fail)
        gate.open()
        tokens(llm)


def test_the_error_has_its_cause(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_function("slice_item")(monkeypatch)
    error = one_failed_run(folder)
    assert isinstance(error.__cause__, RuntimeError)
    assert str(error.__cause__) == "it broke"


def test_of_two_failures_at_once_one_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items stand in slice and quantize at the same time, and both fail: still no group of errors."""
    monkeypatch.setattr("streaming.item_storing.slice_item", fail_from("slice", TENSOR))
    monkeypatch.setattr(
        "streaming.item_storing.store_item", fail_from("quantize", "model.layers.1.post_attention_layernorm.weight")
    )
    for _ in range(5):
        assert isinstance(one_failed_run(folder), LayerLoadError)


def fail_from(stage: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = slice_item if stage == "slice" else store_item

    def fail(item: LoadItem, *rest: Any) -> Any:
        if item.tensor.name == name:
            raise RuntimeError(f"{stage} broke")
        return function(item, *rest)

    return fail


# --- what only the numbers show -------------------------------------------------------------------------------------


def changed(folder: Path, new: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a model with some numbers changed."""
    shutil.copytree(folder, new)
    for file in new.glob("*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    return new


def set_to(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if TENSOR in tensors:
            tensors[TENSOR][3, 4] = value

    return change


def blank(tensors: dict[str, torch.Tensor]) -> None:
    if TENSOR in tensors:
        tensors[TENSOR].zero_()


NUMBERS = {
    "nan": (set_to(float("nan")), "holds NaN"),
    "infinity": (set_to(float("inf")), "holds infinity"),
    "minus infinity": (set_to(float("-inf")), "holds infinity"),
    "zeros": (blank, "holds only zeros: is the download complete?"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_cannot_be_right_are_a_warning_or_an_error(
    case: str, dtype: str, folder: Path, tmp_path: Path
) -> None:
    change, words = NUMBERS[case]
    broken = changed(folder, tmp_path / "broken", change)
    told: list[str] = []
    with LLM(broken, dtype=dtype, hooks=Hooks(warn=told.append)) as llm:
        llm.wait_loaded()
        assert llm.stats().warnings == tuple(told)
    (text,) = told
    assert text.startswith(f"{TENSOR} in model-")
    assert text.endswith(words)
    with pytest.raises(LayerLoadError) as caught, LLM(broken, dtype=dtype, check_weights=True) as llm:
        llm.wait_loaded()
    assert (caught.value.layer, caught.value.stage, caught.value.tensor) == ("layers.1", "check", TENSOR)
    assert str(caught.value).endswith(words)


def test_a_bias_of_zeros_and_a_sound_model_are_not_complained_of(
    tiny_folder: Callable[[TinyModel], Path], tmp_path: Path
) -> None:
    def blank_biases(tensors: dict[str, torch.Tensor]) -> None:
        for name, values in tensors.items():
            if name.endswith(".bias"):
                values.zero_()

    folder = changed(tiny_folder(TinyModel(family="qwen2")), tmp_path / "zero", blank_biases)
    told: list[str] = []
    with LLM(folder, check_weights=True, hooks=Hooks(warn=told.append)) as llm:
        llm.wait_loaded()
    assert told == []


@pytest.mark.parametrize(("family", "complaints"), [("llama", 1), ("gemma", 0)])
def test_a_norm_of_zeros_is_a_fault_but_where_weights_count_from_one(
    family: str, complaints: int, tmp_path: Path
) -> None:
    def blank_norm(tensors: dict[str, torch.Tensor]) -> None:
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"].zero_()

    tiny = write_tiny_model(tmp_path / "tiny", model=TinyModel(family=family, tied=family == "gemma"))
    told: list[str] = []
    with LLM(changed(tiny, tmp_path / "zero", blank_norm), hooks=Hooks(warn=told.append)) as llm:
        llm.wait_loaded()
    assert ["model.norm.weight" in line and "only zeros" in line for line in told] == [True] * complaints


# --- files that change under the load -------------------------------------------------------------------------------


def only_file(tmp_path: Path) -> tuple[Path, Path]:
    folder = write_tiny_model(tmp_path / "model", model=TinyModel(layers=3, files=1))
    return folder, folder / "model.safetensors"


@pytest.mark.parametrize("reader", [ProcessReader, ThreadReader])
def test_a_file_that_shrinks_after_the_plan_is_told_in_words(reader: Callable[..., Any], tmp_path: Path) -> None:
    folder, file = only_file(tmp_path)

    def shrink(prepared: Prepared) -> Any:
        item = next(item for item in prepared.plan.items if item.tensor.name == TENSOR)
        os.truncate(file, item.file_offset + item.nbytes - 1)
        return reader(prepared.read_plan)

    with pytest.raises(LayerLoadError) as caught, reading_with(shrink), LLM(folder) as llm:
        tokens(llm)
    assert caught.value.stage == "read"
    assert f"{file} was changed, or replaced, during the load" in str(caught.value)


def test_a_file_that_is_removed_before_reading_begins_is_named(tmp_path: Path) -> None:
    folder, file = only_file(tmp_path)

    def remove(prepared: Prepared) -> Any:
        file.unlink()
        return ProcessReader(prepared.read_plan)

    with nothing_left(), reading_with(remove), pytest.raises(CheckpointError, match="No such file") as caught:
        LLM(folder)
    assert str(file) in str(caught.value)


def test_a_file_that_is_removed_once_reading_has_begun_is_named(tmp_path: Path) -> None:
    """The reader has it open; the rows of the embedding are read by the forward thread, which opens it anew."""
    folder, file = only_file(tmp_path)

    def remove(prepared: Prepared) -> Any:
        reader = ProcessReader(prepared.read_plan)
        file.unlink()
        return reader

    try:
        with reading_with(remove), LLM(folder) as llm:
            assert len(tokens(llm)) == 2
    except StreamingError as error:
        assert str(file) in str(error)  # noqa: PT017 (either answer is right: it works, or it says what is missing)


def test_an_embedding_that_shrinks_is_told_in_words(tmp_path: Path) -> None:
    folder, file = only_file(tmp_path)
    gate = Gate()
    end = 0

    def shrink(prepared: Prepared) -> Any:
        nonlocal end
        reader = GatedReader(prepared, gate)
        table = prepared.plan.table
        end = table.offset + (min(IDS) + 1) * table.row_nbytes
        os.truncate(file, table.offset + 100)
        return reader

    with pytest.raises(LayerLoadError) as caught, reading_with(shrink), LLM(folder) as llm:
        tokens(llm)
    assert str(caught.value) == (
        f"layer embed, stage read, tensor model.embed_tokens.weight: {file}: ended before its byte {end:,}"
    )


# --- the reader dies ------------------------------------------------------------------------------------------------


def test_a_reader_that_is_killed_ends_every_wait(folder: Path) -> None:
    halted_pids: list[int] = []

    def halted(prepared: Prepared) -> ProcessReader:
        reader = ProcessReader(prepared.read_plan)
        assert reader.pid is not None
        os.kill(reader.pid, signal.SIGSTOP)  # in the middle of the load for certain
        halted_pids.append(reader.pid)
        return reader

    def run() -> None:
        with pytest.raises(WorkerError) as caught, reading_with(halted), LLM(folder) as llm:  # noqa: PT012
            answer, wait = in_background(lambda: tokens(llm)), in_background(lambda: llm.wait_ready("head"))
            os.kill(halted_pids.pop(), signal.SIGKILL)
            for error in (answer.exception(SOON_S), wait.exception(SOON_S)):
                assert isinstance(error, WorkerError)
                assert "the reader ended after " in str(error)
            llm.wait_loaded()
        assert "pieces" in str(caught.value)

    run()
    with nothing_left():
        run()
