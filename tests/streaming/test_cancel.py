"""Ending early: in every stage, while the forward pass waits, from outside; always soon, and nothing is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from examples.write_tiny_model import TinyModel
from layers.sampling_params import SamplingParams
from streaming import LLM, AsyncLLM, Hooks, StreamClosedError, open_llm
from streaming.errors import OptionError
from streaming.plan import LoadItem
from tests.streaming.gates import Gate, GatedReader, gated_llm
from tests.streaming.leftovers import nothing_left
from tests.streaming.waiting import SOON_S, in_background, until

IDS = [5, 9, 2, 7]
STAGES = {"slice": "slice_item", "quantize": "store_item"}


@pytest.fixture
def folder(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    """Three layers; float32 from bfloat16 takes every item through the window."""
    return tiny_folder(TinyModel(layers=3))


class Held:
    """A stage's function that waits, from the first item of layers.1 on, until the test lets it go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        import streaming.item_storing

        self.entered, self.go_on, self.calls = threading.Event(), threading.Event(), 0
        self._function = getattr(streaming.item_storing, name)
        monkeypatch.setattr(f"streaming.item_storing.{name}", self._hold)

    def _hold(self, item: LoadItem, *rest: Any) -> Any:
        if item.layer != "layers.0":
            self.calls += 1
            self.entered.set()
            assert self.go_on.wait(SOON_S)
        return self._function(item, *rest)


def warmed(run: Callable[[], None]) -> None:
    """Run it twice: what torch and the libraries keep for good is there after the first time."""
    run()
    with nothing_left():
        run()


def two_tokens(llm: LLM) -> list[int]:
    return [piece.token_id for piece in llm.pieces([IDS], SamplingParams(max_tokens=2, ignore_eos=True))]


# --- close ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_closing_while_a_stage_is_at_work_ends_with_that_piece_of_work(
    stage: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        with monkeypatch.context() as patched:
            held = Held(patched, STAGES[stage])
            llm = LLM(folder, dtype="float32")
            assert held.entered.wait(SOON_S)
            closing = in_background(llm.close)
            with pytest.raises(StreamClosedError, match="the model was closed while layer head was awaited"):
                llm.wait_ready("head")
            held.go_on.set()
            closing.result(SOON_S)
            assert held.calls == 1

    warmed(run)


def test_closing_while_the_reader_waits_for_its_disk_ends(folder: Path) -> None:
    def run() -> None:
        llm = gated_llm(folder, Gate())
        in_background(llm.close).result(SOON_S)

    warmed(run)


@pytest.mark.parametrize("reader", ["process", "threads"])
def test_closing_at_once_ends(folder: Path, reader: str) -> None:
    def run() -> None:
        LLM(folder, reader=reader).close()

    warmed(run)


def test_closing_while_the_reader_waits_for_room_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window holds one item, which stands in the quantizer: the reader's process waits for it to be released."""

    def run() -> None:
        with monkeypatch.context() as patched:
            held = Held(patched, "store_item")
            llm = LLM(folder, dtype="float32", window=20480)
            assert held.entered.wait(SOON_S)
            closing = in_background(llm.close)
            held.go_on.set()
            closing.result(SOON_S)

    warmed(run)


def test_a_forward_pass_that_waits_is_told_that_the_model_was_closed(folder: Path) -> None:
    def run() -> None:
        reached, gate = threading.Event(), Gate()
        llm = gated_llm(folder, gate, hooks=Hooks(layer_outputs=lambda layer, hidden: reached.set()))
        answer = in_background(lambda: two_tokens(llm))
        gate.let("layers.0")
        assert reached.wait(SOON_S)  # layers.0 has computed, layers.1 is missing
        in_background(llm.close).result(SOON_S)
        error = answer.exception(SOON_S)
        assert isinstance(error, StreamClosedError)
        assert "closed" in str(error)

    warmed(run)


def test_a_request_behind_one_that_waits_is_told_too(folder: Path) -> None:
    reached, gate = threading.Event(), Gate()
    llm = gated_llm(folder, gate, hooks=Hooks(layer_outputs=lambda layer, hidden: reached.set()))
    first = in_background(lambda: two_tokens(llm))
    gate.let("layers.0")
    assert reached.wait(SOON_S)
    second = in_background(lambda: llm.logits(IDS))
    llm.close()
    for answer in (first, second):
        assert isinstance(answer.exception(SOON_S), StreamClosedError)


def test_a_pass_over_a_resident_model_ends_between_two_matmuls(folder: Path) -> None:
    """Closing does not wait for the whole of a long answer."""
    reached, go_on, layers = threading.Event(), threading.Event(), 0

    def hold(layer: str, hidden: object) -> None:
        nonlocal layers
        layers += 1
        reached.set()
        assert go_on.wait(SOON_S)

    llm = LLM(folder, hooks=Hooks(layer_outputs=hold))
    llm.wait_loaded()
    answer = in_background(lambda: two_tokens(llm))
    assert reached.wait(SOON_S)
    closing = in_background(llm.close)
    until(lambda: llm._model.closing)
    go_on.set()
    closing.result(SOON_S)
    assert isinstance(answer.exception(SOON_S), StreamClosedError)
    assert layers == 1


def test_a_closed_model_refuses_work_and_closes_again(folder: Path) -> None:
    llm = LLM(folder)
    llm.close()
    llm.close()
    for call in (lambda: two_tokens(llm), lambda: llm.complete([IDS]), lambda: llm.logits(IDS)):
        with pytest.raises(StreamClosedError, match="closed"):
            call()


def test_an_error_in_the_block_is_the_one_that_comes_out(folder: Path) -> None:
    def run() -> None:
        with pytest.raises(ZeroDivisionError), gated_llm(folder, Gate()):
            _ = 1 // 0

    warmed(run)


def test_an_interrupt_in_the_block_ends_everything(folder: Path) -> None:
    def run() -> None:
        with pytest.raises(KeyboardInterrupt), gated_llm(folder, Gate()):
            raise KeyboardInterrupt

    warmed(run)


def test_an_option_mistake_leaves_nothing(folder: Path) -> None:
    def run() -> None:
        with pytest.raises(OptionError, match="finds no CUDA device"):
            LLM(folder, device="cuda")

    import torch

    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    warmed(run)


# --- a generation that is given up ----------------------------------------------------------------------------------


def test_a_generation_given_up_midway_leaves_the_model_usable(folder: Path) -> None:
    with LLM(folder) as llm:
        expected = two_tokens(llm)
        for _ in range(3):
            pieces = llm.pieces([IDS], SamplingParams(max_tokens=400, ignore_eos=True))
            assert isinstance(pieces, Generator)
            next(pieces)
            pieces.close()
            assert two_tokens(llm) == expected


def test_a_request_after_one_that_was_interrupted_does_not_wait_for_the_load(folder: Path) -> None:
    """Ctrl-C while layers.1 is on disk, and another question: the forward thread must let go of the first one."""
    computed, gate = threading.Semaphore(0), Gate()
    main = threading.get_ident()

    def interrupt() -> None:
        assert computed.acquire(timeout=SOON_S)
        signal.pthread_kill(main, signal.SIGINT)

    with gated_llm(folder, gate, hooks=Hooks(layer_outputs=lambda layer, hidden: computed.release())) as llm:
        gate.let("layers.0")
        in_background(interrupt)
        with pytest.raises(KeyboardInterrupt):
            two_tokens(llm)
        answer = in_background(lambda: two_tokens(llm))
        assert computed.acquire(timeout=5), "the second request has not begun"
        gate.open()
        assert len(answer.result(SOON_S)) == 2


# --- the asynchronous face ------------------------------------------------------------------------------------------

TWO = SamplingParams(max_tokens=2, ignore_eos=True)


async def answer_of(llm: AsyncLLM, ids: list[int]) -> tuple[int, ...]:
    (completion,) = await llm.complete([ids], TWO)
    return completion.token_ids


def test_a_cancel_scope_outside_ends_the_load(folder: Path) -> None:
    def run() -> None:
        gate = Gate()

        async def main() -> bool:
            with anyio.CancelScope() as scope:
                async with open_llm(folder, reader_of=partial(GatedReader, gate=gate)):
                    scope.cancel()
                    await anyio.sleep_forever()
            return scope.cancelled_caught

        assert anyio.run(main) is True

    warmed(run)


@pytest.mark.parametrize("waiting", ["for an answer", "for a layer"])
def test_a_cancel_while_something_is_awaited_ends_both(waiting: str, folder: Path) -> None:
    def run() -> None:
        gate, computed = Gate(), threading.Event()

        async def main() -> bool:
            hooks = Hooks(layer_outputs=lambda layer, hidden: computed.set())
            with anyio.CancelScope() as scope:
                async with (
                    open_llm(folder, hooks=hooks, reader_of=partial(GatedReader, gate=gate)) as llm,
                    anyio.create_task_group() as tasks,
                ):
                    gate.let("layers.0")
                    tasks.start_soon(*((answer_of, llm, IDS) if waiting == "for an answer" else (llm.wait_ready, 1)))
                    if waiting == "for an answer":
                        assert await anyio.to_thread.run_sync(computed.wait, SOON_S)
                    await llm.wait_ready(0)
                    scope.cancel()
            return scope.cancelled_caught

        assert anyio.run(main) is True

    warmed(run)


def test_an_answer_that_is_cancelled_leaves_the_model_to_the_next(folder: Path) -> None:
    """The first waits for layers.1, which is on disk, and is cancelled; the second begins at once."""
    computed, gate = threading.Semaphore(0), Gate()

    async def main() -> tuple[int, ...]:
        hooks = Hooks(layer_outputs=lambda layer, hidden: computed.release())
        async with open_llm(folder, hooks=hooks, reader_of=partial(GatedReader, gate=gate)) as llm:
            gate.let("layers.0")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answer_of, llm, [1, 2])
                assert await anyio.to_thread.run_sync(lambda: computed.acquire(timeout=SOON_S))
                tasks.cancel_scope.cancel()
            async with anyio.create_task_group() as tasks:
                answers = list[tuple[int, ...]]()

                async def ask() -> None:
                    answers.append(await answer_of(llm, IDS))

                tasks.start_soon(ask)
                assert await anyio.to_thread.run_sync(lambda: computed.acquire(timeout=SOON_S))
                gate.open()
            return answers[0]

    with LLM(folder) as llm:
        assert anyio.run(main) == tuple(two_tokens(llm))


def test_leaving_the_loop_early_cancels_the_rest(folder: Path) -> None:
    async def main() -> tuple[int, ...]:
        async with open_llm(folder) as llm:
            async with aclosing(llm.pieces([IDS], SamplingParams(max_tokens=400, ignore_eos=True))) as pieces:
                async for _ in pieces:
                    break
            found = await answer_of(llm, IDS)
            assert [completion.token_ids for completion in llm.model.completions] == [found]
            return found

    with LLM(folder) as llm:
        assert anyio.run(main) == tuple(two_tokens(llm))


def test_two_tasks_are_each_given_their_own_answer(folder: Path) -> None:
    async def main() -> list[tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        async with open_llm(folder) as llm, anyio.create_task_group() as tasks:

            async def ask(first_id: int) -> None:
                found[first_id] = await answer_of(llm, [first_id, 7])

            for first_id in range(4):
                tasks.start_soon(ask, first_id)
        return [found[first_id] for first_id in range(4)]

    with LLM(folder) as llm:
        expected = [llm.complete([[first_id, 7]], TWO)[0].token_ids for first_id in range(4)]
    assert anyio.run(main) == expected


def test_a_task_group_around_the_model_is_cancelled_with_its_own_error_alone(folder: Path) -> None:
    reader_of = partial(GatedReader, gate=Gate())

    async def fail() -> None:
        raise ZeroDivisionError("another task")

    async def main() -> None:
        async with anyio.create_task_group() as tasks, open_llm(folder, reader_of=reader_of):
            tasks.start_soon(fail)
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        anyio.run(main)
    assert [type(error) for error in caught.value.exceptions] == [ZeroDivisionError]


def test_an_error_in_the_asynchronous_block_comes_out_alone(folder: Path) -> None:
    async def main() -> None:
        async with open_llm(folder, reader_of=partial(GatedReader, gate=Gate())):
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        anyio.run(main)


def test_a_model_can_be_opened_again_in_the_same_loop(folder: Path) -> None:
    async def main() -> list[tuple[int, ...]]:
        found = []
        for _ in range(2):
            async with open_llm(folder) as llm:
                found.append(await answer_of(llm, IDS))
        return found

    first, second = anyio.run(main)
    assert first == second
    assert len(first) == 2
