"""The CUDA device's order of calls, on a machine without one: torch's CUDA functions are recorded, memory is the CPU's.

What the calls do on a GPU is checked there (examples/gpu_check.py); that they come in an order that cannot let go of
memory in use is checked here.
"""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.write_tiny_model import TinyModel, write_tiny_model
from streaming import LLM, BudgetError, OptionError, SamplingParams, device
from streaming.reader import ProcessReader

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


class FakeCuda:
    """Stands in for torch.cuda: one device whose streams are the CPU's own order of work."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.lock = threading.Lock()
        self.register_code = 0
        self.free, self.reserved, self.integrated = 1 << 40, 0, False
        cuda = self

        class Stream:
            def __init__(self, _device: object = None) -> None:
                self.device = torch.device("cpu")

            def synchronize(self) -> None:
                cuda.note("stream idle")

            def wait_event(self, event: object) -> None:
                cuda.note("ordered behind", event)

            def __enter__(self) -> None:
                return None

            def __exit__(self, *_error: object) -> None:
                return None

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking, "a waiting worker must not spin on the reader's core"

            def record(self, _stream: Stream) -> None:
                cuda.note("recorded", self)

            def synchronize(self) -> None:
                cuda.note("awaited", self)

        self.Stream, self.Event = Stream, Event

    def note(self, *entry: Any) -> None:
        with self.lock:
            self.log.append(entry)

    def names(self) -> list[str]:
        return [entry[0] for entry in self.log]

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  (CUDA's name)
        self.note("register", address, nbytes, flags)
        return self.register_code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.note("unregister", address)
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    release = ProcessReader.release

    def noted_release(reader: ProcessReader, count: int) -> None:
        fake.note("released", count)
        release(reader, count)

    monkeypatch.setattr(ProcessReader, "release", noted_release)
    monkeypatch.setattr(device, "cuda_device", lambda _name: torch.device("cpu"))
    for name, value in {
        "cudart": lambda: fake,
        "mem_get_info": lambda _device: (fake.free, 1 << 40),
        "memory_reserved": lambda _device: fake.reserved,
        "memory_allocated": lambda _device: 0,
        "empty_cache": lambda: fake.note("gave back"),
        "get_device_properties": lambda _device: SimpleNamespace(is_integrated=fake.integrated),
        "current_stream": lambda _device: fake.Stream(),
        "stream": lambda stream: stream,
        "device": lambda _device: fake.Stream(),
        "Stream": fake.Stream,
        "Event": fake.Event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), model=TinyModel(layers=3))


def descriptors() -> int:
    gc.collect()  # a mapping keeps a descriptor of its own for as long as an error's frames keep the mapping
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_same_tokens_as_on_the_cpu(tiny: Path, cuda: FakeCuda) -> None:
    with LLM(tiny) as llm:
        expected = llm.complete([[1, 2, 3]], PARAMS)
    assert cuda.log == []
    with LLM(tiny, device="cuda") as llm:
        assert llm.complete([[1, 2, 3]], PARAMS) == expected


def test_the_window_is_page_locked_once_and_let_go_when_the_stream_is_idle(tiny: Path, cuda: FakeCuda) -> None:
    with LLM(tiny, device="cuda") as llm:
        llm.wait_loaded()
        window_nbytes = llm.stats().window_bytes
        assert "unregister" not in cuda.names()
    ((_, address, nbytes, flags),) = [entry for entry in cuda.log if entry[0] == "register"]
    assert (nbytes, flags) == (window_nbytes, 1)
    assert cuda.log[-2:] == [("stream idle",), ("unregister", address)]


def test_a_part_of_the_window_is_released_only_when_its_copy_has_ended(tiny: Path, cuda: FakeCuda) -> None:
    with LLM(tiny, device="cuda") as llm:
        llm.wait_loaded()
    copies: list[object] = []  # per item: the first event is behind its copy, the second behind its quantization
    awaited = released = 0
    for entry in cuda.log:
        if entry[0] == "awaited":
            awaited += 1
            copies.append(entry[1])
        elif entry[0] == "released":
            assert released < entry[1] <= awaited  # small items are released together
            released = entry[1]
    recorded = [entry[1] for entry in cuda.log if entry[0] == "recorded"]
    assert len(recorded) == 2 * released
    assert len(set(map(id, copies))) == released


def test_the_forward_pass_is_ordered_behind_the_last_event_of_every_layer(tiny: Path, cuda: FakeCuda) -> None:
    with LLM(tiny, device="cuda") as llm:
        llm.wait_loaded()
        recorded = [entry[1] for entry in cuda.log if entry[0] == "recorded"]
        cuda.log.clear()
        llm.complete([[1, 2, 3]], SamplingParams(max_tokens=1))
        ordered = [entry[1] for entry in cuda.log if entry[0] == "ordered behind"]
        assert [event in recorded for event in ordered] == [
            True
        ] * 4  # the table and three layers; on the CPU the head goes by rows
        assert len(set(map(id, ordered))) == 4
        assert "awaited" not in cuda.names()  # the host waits for none of them


def test_a_window_that_cannot_be_page_locked_ends_the_start(tiny: Path, cuda: FakeCuda) -> None:
    cuda.register_code = 2
    before = descriptors()
    with pytest.raises(MemoryError, match=r"page-locking the window of .* failed with CUDA error 2: try a smaller --w"):
        LLM(tiny, device="cuda")
    assert "unregister" not in cuda.names()
    assert descriptors() == before


def test_weights_without_room_are_refused_before_anything_is_allocated(tiny: Path, cuda: FakeCuda) -> None:
    cuda.free = 1000
    with pytest.raises(
        BudgetError, match=r"--device cpu: the weights take .* KiB, but 1000 B of its 1024.0 GiB are free"
    ):
        LLM(tiny, device="cuda")
    assert "register" not in cuda.names()


@pytest.mark.parametrize(
    ("free", "cached", "needed", "unified", "expected"),
    [
        (99, 10, 100, False, True),
        (100, 10, 100, False, False),
        (99, 0, 100, False, False),  # there is nothing to give
        (100, 10, 0, True, True),
        (100, 0, 0, True, False),
    ],
)
def test_memory_goes_back_when_the_next_layer_would_not_find_it(
    free: int, cached: int, needed: int, unified: bool, expected: bool
) -> None:
    assert device.gives_back(free=free, cached=cached, needed=needed, unified=unified) is expected


@pytest.mark.parametrize(
    ("free", "reserved", "integrated", "times"),
    [
        (1 << 40, 5, False, 0),
        (3 << 20, 5, False, 0),  # the tiny layers pass in less
        (5000, 1 << 40, False, 5),  # before each of: table, three layers, head
        (1 << 40, 5, True, 6),  # and behind the last one
    ],
)
def test_memory_goes_back_between_layers_and_never_inside_one(
    tiny: Path, cuda: FakeCuda, free: int, reserved: int, integrated: bool, times: int
) -> None:
    cuda.free, cuda.reserved, cuda.integrated = free, reserved, integrated
    with LLM(tiny, device="cuda") as llm:
        llm.wait_loaded()
    assert cuda.names().count("gave back") == times


def test_without_an_accelerator_nothing_is_given_back(tiny: Path, cuda: FakeCuda) -> None:
    cuda.reserved, cuda.integrated = 5, True
    with LLM(tiny) as llm:
        llm.wait_loaded()
        assert llm.stats().stages["post-process"] == 0
    assert cuda.log == []


@pytest.mark.parametrize("name", ["cuda:2", "cuda:x", "cuda:", "cpu"])
def test_a_device_that_is_not_there_is_named_with_those_that_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OptionError, match=f"--device {name}: the devices here are cuda:0, cuda:1"):
        device.cuda_device(name)


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_device_has_a_number_whatever_a_threads_own_device_is(
    name: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.cuda_device(name) == torch.device("cuda", index)


def test_without_cuda_the_error_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match=r"--device cuda: torch .* finds no CUDA device; --device cpu runs here"):
        device.cuda_device("cuda")
