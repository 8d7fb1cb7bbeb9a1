"""What all tests of the runtime share: a limit of time for each, and tiny checkpoints that are written once."""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from examples.write_tiny_model import TinyModel, write_tiny_model

LIMIT_S = 60  # a test that waits for what never comes ends here, with the stack of every thread


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Interrupt a test that hangs, so that the others still run."""

    def expire(signum: int, frame: object) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        raise TimeoutError(f"{item.nodeid} took longer than {LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyModel], Path]:
    """The folder of a tiny model, written when it is first asked for."""
    root, written = tmp_path_factory.mktemp("tiny"), dict[TinyModel, Path]()

    def folder(model: TinyModel) -> Path:
        if model not in written:
            written[model] = write_tiny_model(root / str(len(written)), model=model)
        return written[model]

    return folder


@pytest.fixture(scope="session")
def four_layers(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    """A llama of four layers in bfloat16, in two files, its head of its own."""
    return tiny_folder(TinyModel(layers=4))
