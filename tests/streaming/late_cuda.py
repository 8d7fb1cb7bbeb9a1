"""CUDA's two streams on the CPU, with copies that run as late as they may, and a look at what each was ordered behind.

Products run when they are called. A copy of the side stream runs when the compute stream waits for an event behind it,
or when it has to (the stream is awaited as a whole): if nobody orders products behind it, they read what was there
before. Products cannot run late, so the other orders are looked at instead: `faults` names copies to memory whose last
use the side stream was not ordered behind, and copies from memory that another one, which may still run, reads too.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from streaming.device import CudaDevice
from streaming.weight_stream import WeightStream


class LateCuda:
    """Stands in for the streams of torch.cuda; `runs_late`: an event that a thread awaits does not make copies run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, runs_late: bool) -> None:
        self.faults: list[str] = []
        self.copies = 0
        self._lock = threading.Condition(threading.RLock())
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []  # copies of the side stream that have not run
        self._ran = self._issued = 0
        self._uses: dict[tuple[int, int], int] = {}  # memory -> when it was used last
        self._now = self._seen = 0  # how often memory was used; and which of these uses the side stream is behind
        cuda = self

        class Stream:
            def __init__(self, _device: object = None, *, computes: bool = False) -> None:
                self.device, self.computes = torch.device("cpu"), computes

            def synchronize(self) -> None:
                cuda.run(cuda._issued)

            def wait_event(self, event: Event) -> None:
                if self.computes and not event.computes:
                    cuda.run(event.at)
                elif not self.computes and event.computes:
                    with cuda._lock:
                        cuda._seen = max(cuda._seen, event.at)

            def __enter__(self) -> None:
                return None

            def __exit__(self, *_error: object) -> None:
                return None

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking
                self.computes, self.at = False, 0

            def record(self, stream: Stream) -> None:
                self.computes = stream.computes
                with cuda._lock:
                    self.at = cuda._now if stream.computes else cuda._issued

            def synchronize(self) -> None:
                if not runs_late:
                    cuda.run(self.at)

        release = WeightStream._release

        def noted_release(stream: WeightStream, unit: Any, entry: Any) -> None:
            if entry is not None:
                cuda.note_use(entry.place.memory)
            release(stream, unit, entry)

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream(computes=True))
        monkeypatch.setattr(CudaDevice, "copy", lambda _self, target, source: cuda.copy(target, source))
        monkeypatch.setattr(WeightStream, "_release", noted_release)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue it."""
        with self._lock:
            for place, used in self._uses.items():
                if used > self._seen and overlap(place, run_of(target)):
                    self.faults.append(f"the device's memory {place} is written while it may still be read")
            if any(overlap(run_of(source), run_of(other)) for _, other in self._waiting):
                self.faults.append(f"the host's memory {run_of(source)} was written while it may still be copied")
            self._waiting.append((target, source))
            self._issued += 1
            self.copies += 1
            self._lock.notify_all()

    def wait_for_copies(self, count: int) -> None:
        """Block until so many were issued."""
        with self._lock:
            assert self._lock.wait_for(lambda: self.copies >= count, timeout=20)

    def run(self, until: int) -> None:
        """The copies issued so far, up to the one of this number."""
        with self._lock, torch.inference_mode():
            while self._ran < until:
                target, source = self._waiting.pop(0)
                target.copy_(source)
                self._ran += 1

    def note_use(self, memory: torch.Tensor) -> None:
        """A product that reads the memory was issued."""
        with self._lock:
            self._now += 1
            self._uses[run_of(memory)] = self._now


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two runs of addresses have any in common."""
    return one[0] < other[1] and other[0] < one[1]


def run_of(memory: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's bytes."""
    return memory.data_ptr(), memory.data_ptr() + memory.numel()
