"""The pipeline on a gated checkpoint: layers compute while later ones are on disk; order, bounds, accounts."""

from __future__ import annotations

import json
import queue
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.weights import ParamKind
from quant.registry import scheme_names
from streaming import LLM, Hooks, LayerState, LoadOptions, SamplingParams, open_llm
from streaming.plan import make_plan
from streaming.prepare import prepare
from streaming.reader import ThreadReader
from streaming.stages import store_item
from tests.streaming.gates import Gate, GatedReader, LoggedReader, WindowLog, gated_llm, reading_with
from tests.streaming.leftovers import nothing_left
from tests.streaming.resident import resident_model, run_resident, same_bits
from tests.streaming.waiting import SOON_S, in_background

IDS = [5, 9, 2, 7]
LAYERS = [f"layers.{index}" for index in range(4)]


def first_token(llm: LLM, ids: list[int] = IDS) -> int:
    (completion,) = llm.complete([ids], SamplingParams(max_tokens=1, ignore_eos=True))
    return completion.token_ids[0]


def expected_token(folder: Path, ids: list[int] = IDS) -> int:
    return int(run_resident(resident_model(folder), ids).logits[-1].argmax())


# --- progress -------------------------------------------------------------------------------------------------------


def test_each_layer_computes_as_soon_as_its_own_bytes_are_there(four_layers: Path) -> None:
    outputs: queue.SimpleQueue[str] = queue.SimpleQueue()
    gate, hooks = Gate(), Hooks(layer_outputs=lambda layer, hidden: outputs.put(layer))
    with gated_llm(four_layers, gate, hooks=hooks) as llm:
        token = in_background(lambda: first_token(llm))
        for index, layer in enumerate(LAYERS):
            assert llm.wait_ready(index, timeout=0) is False
            gate.let(layer)
            assert llm.wait_ready(index, timeout=SOON_S) is True
            assert outputs.get(timeout=SOON_S) == layer
            assert [llm.readiness[name] is LayerState.READY for name in LAYERS] == [n <= index for n in range(4)]
        assert outputs.empty()
        assert not token.done()  # the head is still missing
        gate.let("head")
        assert token.result(SOON_S) == expected_token(four_layers)  # the table's rows were fetched on their own
        assert llm.wait_ready("embed", timeout=0) is False
        gate.open()
        llm.wait_loaded()
        assert set(llm.readiness.values()) == {LayerState.READY}


def test_the_same_through_the_asynchronous_face(four_layers: Path) -> None:
    gate, seen = Gate(), queue.SimpleQueue[str]()

    async def main() -> tuple[list[str], list[int]]:
        hooks, computed, answer = Hooks(layer_outputs=lambda layer, hidden: seen.put(layer)), [], list[int]()

        async def ask() -> None:
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            answer.extend([piece.token_id async for piece in llm.pieces([IDS], params)])

        async with open_llm(four_layers, hooks=hooks, reader_of=partial(GatedReader, gate=gate)) as llm:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                for layer in LAYERS:
                    gate.let(layer)
                    await llm.wait_ready(layer)
                    computed.append(await anyio.to_thread.run_sync(lambda: seen.get(timeout=SOON_S)))
                    assert llm.readiness["head"] is not LayerState.READY
                gate.open()
            await llm.wait_loaded()
        return computed, answer

    assert anyio.run(main) == (LAYERS, [expected_token(four_layers)])


def test_the_head_computes_rows_while_its_last_ones_arrive(four_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head in ten runs of rows: with nine of them there, its forward pass waits for the tenth alone."""
    monkeypatch.setattr("streaming.prepare.make_plan", partial(make_plan, item_nbytes=16 * 64 * 2))
    held = threading.Event()
    prepared = prepare(str(four_layers), LoadOptions(dtype="float32"))
    head = [item.index for item in prepared.plan.items if item.param.name == "lm_head.weight"]
    assert len(head) == 10

    def hold(piece: int) -> None:
        if prepared.read_plan.pieces[piece].item == head[-1]:
            held.wait(SOON_S)

    with reading_with(lambda prepared: ThreadReader(prepared.read_plan, before=hold)), LLM.start(prepared) as llm:
        table = llm._model.residency
        token = in_background(lambda: first_token(llm))
        table.lease_rows("head", "lm_head.weight", 144, stop=lambda: None)
        assert table.states()["head"] is LayerState.LOADING
        assert not token.done()
        held.set()
        assert 0 <= token.result(SOON_S) < 160


# --- order ----------------------------------------------------------------------------------------------------------


def test_layers_become_ready_in_plan_order_each_after_its_stages(four_layers: Path) -> None:
    order = [*LAYERS, "head", "embed"]
    stages: list[tuple[str, str, int]] = []
    gate = Gate()
    hooks = Hooks(on_stage=lambda layer, stage, nbytes, seconds: stages.append((layer, stage, nbytes)))
    with gated_llm(four_layers, gate, hooks=hooks, dtype="float32") as llm:
        changes: list[tuple[str, LayerState]] = []
        llm.on_change(lambda layer, state: changes.append((layer, state)))
        gate.open()
        llm.wait_loaded()
        plans = {layer.name: layer for layer in llm.prepared.plan.layers}
    assert [layer for layer, state in changes if state is LayerState.READY] == order
    for layer in order:
        assert [(stage, nbytes) for name, stage, nbytes in stages if name == layer] == [
            ("read", plans[layer].read_nbytes),
            ("quantize", plans[layer].kept_nbytes),
            ("publish", plans[layer].kept_nbytes),
        ]
    for stage in ("read", "quantize", "publish"):
        assert [name for name, passed, _ in stages if passed == stage] == order


def test_a_callback_on_ready_sees_the_layers_final_numbers(four_layers: Path) -> None:
    model = resident_model(four_layers)
    expected = dict(model.named_parameters())
    wrong: list[str] = []
    gate = Gate()
    with gated_llm(four_layers, gate) as llm:

        def compare(layer: str, state: LayerState) -> None:
            if state is LayerState.READY:
                names = [name for name in expected if name.startswith(f"model.{layer}.")]
                wrong.extend(n for n in names if not same_bits(llm.shell.get_parameter(n), expected[n]))

        llm.on_change(compare)
        gate.open()
        llm.wait_loaded()
        assert all(same_bits(llm.shell.get_parameter(name), expected[name]) for name in expected)
    assert wrong == []


# --- bounds ---------------------------------------------------------------------------------------------------------


def largest_staged(folder: Path, **options: object) -> int:
    return prepare(str(folder), LoadOptions(**options)).plan.largest_staged_nbytes  # type: ignore[arg-type]


@pytest.mark.parametrize("quantization", scheme_names())
@pytest.mark.parametrize("factor", [1, 2, 5])
def test_the_window_never_holds_more_than_it_may(four_layers: Path, quantization: str, factor: int) -> None:
    dtype = "float32" if quantization == "none" else "auto"  # bfloat16 would be read straight to its place
    window = factor * largest_staged(four_layers, quantization=quantization, dtype=dtype)
    log, gate = WindowLog(), Gate(opened=True)
    with (
        reading_with(lambda prepared: LoggedReader(prepared, gate, log)),
        LLM(four_layers, quantization=quantization, dtype=dtype, window=window) as llm,
    ):
        llm.wait_loaded()
        pieces = len(llm.prepared.read_plan.pieces)
        assert llm.prepared.read_plan.window_nbytes <= window
        assert llm.stats().window_bytes <= window
    assert 0 < log.peak_nbytes <= window
    assert sorted(log.begun) == list(range(pieces))


def test_pieces_are_begun_in_plan_order(four_layers: Path) -> None:
    """Two threads take them, so neighbours may change places; no piece is begun two places early."""
    log, gate = WindowLog(), Gate(opened=True)
    with reading_with(lambda prepared: LoggedReader(prepared, gate, log)), LLM(four_layers) as llm:
        llm.wait_loaded()
    assert all(abs(piece - place) <= 1 for place, piece in enumerate(log.begun))


def test_nothing_beyond_the_window_is_read_while_the_quantizer_is_busy(
    four_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow_store(*arguments: object) -> None:
        entered.set()
        assert go_on.wait(SOON_S)
        store_item(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("streaming.item_storing.store_item", slow_store)
    window = largest_staged(four_layers, dtype="float32")
    log, gate = WindowLog(), Gate(opened=True)
    with (
        reading_with(lambda prepared: LoggedReader(prepared, gate, log)),
        LLM(four_layers, dtype="float32", window=window) as llm,
    ):
        assert entered.wait(SOON_S)  # the first item stands in the quantize stage, none is released
        allowed = {n for n, piece in enumerate(llm.prepared.read_plan.pieces) if piece.released == 0}
        assert set(log.begun) <= allowed
        go_on.set()
        llm.wait_loaded()
    assert len(log.begun) > len(allowed)


# --- accounts -------------------------------------------------------------------------------------------------------


def test_what_was_read_and_kept_is_what_the_plan_said(four_layers: Path) -> None:
    with LLM(four_layers, dtype="float32") as llm:
        first_token(llm)
        llm.wait_loaded()
        stats, plan = llm.stats(), llm.prepared.plan
    on_disk = sum(file.stat().st_size for file in four_layers.glob("*.safetensors"))
    assert plan.read_nbytes < on_disk
    assert plan.read_nbytes <= stats.bytes_read <= plan.read_nbytes + len(IDS) * 128  # and a row of the table each
    assert stats.bytes_kept == plan.kept_nbytes == 2 * plan.read_nbytes
    assert stats.layers_by_scheme == {"none": 6}  # the embedding and the head are layers too
    assert set(stats.stages) >= {"import", "read", "slice", "quantize", "publish", "forward"}


@pytest.mark.parametrize("quantization", [name for name in scheme_names() if name != "none"])
def test_the_summary_counts_layers_by_scheme(four_layers: Path, quantization: str) -> None:
    with LLM(four_layers, quantization=quantization) as llm:
        llm.wait_loaded()
        assert llm.stats().layers_by_scheme == {quantization: 4, "none": 2}
        kinds = {
            param.scheme.name: param.kind for spec in llm.prepared.specs for param in spec.params
            if param.kind is ParamKind.LINEAR
        }  # fmt: skip
        assert kinds == {quantization: ParamKind.LINEAR}


def test_the_summary_of_a_second_generation_is_its_own(four_layers: Path) -> None:
    with LLM(four_layers) as llm:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        for _ in range(3):
            llm.complete([IDS], params)
        stats = llm.stats()
    assert stats.forward_s is not None
    assert stats.decode_tok_s is not None
    assert stats.tokens_per_s == pytest.approx(5 / (stats.forward_s + 4 / stats.decode_tok_s))


def test_moments_come_in_their_order(four_layers: Path) -> None:
    with LLM(four_layers) as llm:
        first_token(llm)
        llm.wait_loaded()
        stats = llm.stats()
    assert stats.import_s is not None
    assert stats.first_layer_ready_s is not None
    assert stats.first_forward_s is not None
    assert stats.ttft_s is not None
    assert stats.load_done_s is not None
    assert stats.import_s >= 0
    assert 0 <= stats.first_layer_ready_s <= stats.first_forward_s <= stats.ttft_s
    assert stats.first_layer_ready_s <= stats.load_done_s


# --- several --------------------------------------------------------------------------------------------------------


def test_two_models_live_in_one_process_at_once(tiny_folder: Callable[[TinyModel], Path]) -> None:
    folders = [tiny_folder(TinyModel(family="llama", seed=1)), tiny_folder(TinyModel(family="qwen3", tied=True))]
    params = SamplingParams(max_tokens=6, ignore_eos=True)

    def alone(folder: Path) -> list[int]:
        with LLM(folder) as llm:
            return [piece.token_id for piece in llm.pieces([IDS], params)]

    expected = [alone(folder) for folder in folders]
    gates = [Gate(), Gate()]
    with gated_llm(folders[0], gates[0]) as first, gated_llm(folders[1], gates[1]) as second:
        answers = [first.pieces([IDS], params), second.pieces([IDS], params)]
        for gate in gates:
            gate.open()
        found: list[list[int]] = [[], []]
        for _ in range(6):
            for answer, tokens in zip(answers, found, strict=True):
                tokens.append(next(answer).token_id)
    assert found == expected


def test_a_model_with_every_layer_in_a_file_of_its_own(tiny_folder: Callable[[TinyModel], Path]) -> None:
    folder = tiny_folder(TinyModel(layers=4, files=12))
    with LLM(folder) as llm:
        assert len(llm.prepared.read_plan.files) == 12
        assert first_token(llm) == expected_token(folder)


@pytest.fixture
def both_matrices(tiny_folder: Callable[[TinyModel], Path], tmp_path: Path) -> Path:
    """A model whose config ties embedding and head, and whose files hold both, which differ."""
    folder = Path(shutil.copytree(tiny_folder(TinyModel(layers=2, seed=3)), tmp_path / "both"))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    return folder


def test_a_tied_model_with_both_matrices_on_disk_uses_the_head_on_disk(
    tiny_folder: Callable[[TinyModel], Path], both_matrices: Path
) -> None:
    told: list[str] = []
    with LLM(both_matrices, hooks=Hooks(warn=told.append)) as llm:
        assert first_token(llm) == expected_token(tiny_folder(TinyModel(layers=2, seed=3)))
        llm.wait_loaded()
    assert any("lm_head.weight on disk differs" in text for text in told)


def test_a_load_is_done_when_its_last_step_is(both_matrices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of the tied matrices belongs to the load: who waits for the load waits for it, and is told."""
    entered, go_on = threading.Event(), threading.Event()

    def hold(*ignored: object) -> None:
        entered.set()
        go_on.wait(SOON_S)

    monkeypatch.setattr("streaming.model_run.compare_tied", hold)
    with LLM(both_matrices) as llm:
        loaded = in_background(llm.wait_loaded)
        try:
            assert entered.wait(SOON_S)
            with pytest.raises(TimeoutError):
                loaded.result(0.1)
        finally:
            go_on.set()
        loaded.result(SOON_S)
        assert llm.stats().load_done_s is not None


def test_a_loaded_model_leaves_nothing_behind(four_layers: Path) -> None:
    def run() -> None:
        with LLM(four_layers) as llm:
            first_token(llm)

    run()  # what torch and the libraries keep for good is there now
    with nothing_left():
        run()


def test_a_checkpoint_is_streamed_with_one_compute_thread_or_more(four_layers: Path) -> None:
    expected = run_resident(resident_model(four_layers), IDS).logits
    before = torch.get_num_threads()
    for threads in (1, 2):
        with LLM(four_layers, threads=threads) as llm:
            assert same_bits(llm.logits(IDS), expected)
            llm.wait_loaded()
            assert same_bits(llm.logits(IDS), expected)
    assert torch.get_num_threads() == before
