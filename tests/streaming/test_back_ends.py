"""Load formats whose package gets the bytes: the same logits to the bit, the same words for faults."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from examples.write_tiny_model import TinyModel, write_tiny_model
from streaming import LLM, LayerLoadError, reader_choice
from streaming.back_end_reading import fetch_all, open_batches
from streaming.errors import CheckpointError, OptionError
from streaming.options import LoadOptions
from streaming.prepare import Prepared, prepare
from streaming.read_strategy import BATCH_NBYTES
from streaming.reader_choice import start_reader
from streaming.reading_records import RECORD, SHORT
from tests.streaming.gates import reading_with
from tests.streaming.leftovers import nothing_left
from tests.streaming.resident import resident_model, run_resident, same_bits
from tests.streaming.waiting import in_background

IDS = [5, 9, 2, 7]
MODULES = {"runai_streamer": "runai_model_streamer", "fastsafetensors": "fastsafetensors"}
each_back_end = pytest.mark.parametrize(
    "load_format",
    [pytest.param(name, marks=pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed"))
     for name, module in MODULES.items()],
)  # fmt: skip


@each_back_end
@pytest.mark.parametrize("quantization", ["none", "int8_per_channel"])
def test_a_back_end_gives_the_resident_models_logits(four_layers: Path, load_format: str, quantization: str) -> None:
    expected = run_resident(resident_model(four_layers, quantization=quantization), IDS).logits
    with nothing_left(), LLM(four_layers, load_format=load_format, quantization=quantization, window="64KiB") as llm:
        assert same_bits(llm.logits(IDS), expected)
        assert llm.stats().read_strategy == load_format
        del llm


@each_back_end
def test_what_the_package_holds_is_in_the_plan(four_layers: Path, load_format: str) -> None:
    """A batch of pieces in its buffers (Run:ai's), or a buffer for each of its threads."""
    held = prepare(str(four_layers), LoadOptions(load_format=load_format)).budget.file_nbytes
    read_nbytes = prepare(str(four_layers), LoadOptions()).plan.read_nbytes
    assert held == {"runai_streamer": read_nbytes, "fastsafetensors": 4 * (16 << 20)}[load_format]


@each_back_end
def test_a_file_that_shrinks_is_told_in_the_same_words(tmp_path: Path, load_format: str) -> None:
    folder = write_tiny_model(tmp_path / "model", model=TinyModel(layers=2, files=1))
    file = folder / "model.safetensors"

    def shrink(prepared: Prepared) -> Any:
        os.truncate(file, 20_000)
        return start_reader(prepared)

    with pytest.raises((LayerLoadError, CheckpointError)) as caught, reading_with(shrink):  # noqa: SIM117
        with LLM(folder, load_format=load_format) as llm:
            llm.wait_loaded()
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("load_format", "install"), [("runai_streamer", "runai-model-streamer"), ("fastsafetensors", "fastsafetensors")]
)
def test_a_package_that_is_missing_is_named_with_its_install_line(
    four_layers: Path, load_format: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streaming.checkpoint.formats.find_spec", lambda name: None)
    with pytest.raises(OptionError) as caught:
        prepare(str(four_layers), LoadOptions(load_format=load_format))
    assert str(caught.value) == f"--load-format {load_format} needs a package: pip install {install}"


def test_instanttensor_names_the_device_that_it_needs(four_layers: Path) -> None:
    with pytest.raises(OptionError, match="--load-format instanttensor needs a CUDA GPU"):
        prepare(str(four_layers), LoadOptions(load_format="instanttensor"))


@pytest.mark.skipif(find_spec("instanttensor") is not None, reason="instanttensor is installed")
def test_instanttensor_on_a_gpu_needs_its_package(four_layers: Path) -> None:
    with pytest.raises(OptionError, match=r"pip install 'instanttensor>=0\.2\.2'"):
        prepare(str(four_layers), LoadOptions(load_format="instanttensor", device="cuda"))


STAND_IN = '''
"""As much of instanttensor 0.2.2 as is used, by its documentation, without a GPU; it notes what it was asked for."""

import os
from contextlib import contextmanager

import safetensors


class _Opened:
    def __init__(self, file, names):
        self._file, self._names = file, names

    def tensors(self):
        for name in self._file.offset_keys():
            if name in self._names:
                yield name, self._file.get_tensor(name)


@contextmanager
def safe_open(filename, framework, device, process_group=None, *, tensor_filter=None, tensor_name_match_mode="glob"):
    assert (framework, device, tensor_name_match_mode) == ("pt", "cpu:0", "exact")
    (path,) = filename
    with open(os.environ["ASKED_FOR"], "a") as asked:
        asked.writelines(f"{name}\\n" for name in tensor_filter)
    with safetensors.safe_open(path, framework="pt") as file:
        yield _Opened(file, set(tensor_filter))
'''


@pytest.mark.parametrize(
    ("quantization", "batch_nbytes"),
    [
        ("none", BATCH_NBYTES), ("int8_per_channel", 20_000),
        pytest.param("none", 20_000, marks=pytest.mark.slow),
        pytest.param("int8_per_channel", BATCH_NBYTES, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_instanttensor_would_give_becomes_the_resident_models_logits(
    four_layers: Path, tmp_path: Path, quantization: str, batch_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the package, which needs a GPU; each tensor is asked for once, however small the batches."""
    (tmp_path / "instanttensor.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ASKED_FOR", str(tmp_path / "asked"))
    monkeypatch.setattr("streaming.read_choice._check_instanttensor", lambda device: None)
    monkeypatch.setattr("streaming.piece_cutting.PIECE_NBYTES", 4096)
    small = f"import streaming.back_end_reading as b; b.BATCH_NBYTES = {batch_nbytes}; "
    program = reader_choice._PROGRAMS["instanttensor"]
    monkeypatch.setitem(reader_choice._PROGRAMS, "instanttensor", small + program)
    expected = run_resident(resident_model(four_layers, quantization=quantization), IDS).logits
    with nothing_left(), LLM(four_layers, load_format="instanttensor", quantization=quantization) as llm:
        assert same_bits(llm.logits(IDS), expected)
        assert llm.stats().read_strategy == "instanttensor"
        wanted = {item.tensor.name for item in llm.prepared.plan.items}
        del llm
    asked = (tmp_path / "asked").read_text().splitlines()
    assert sorted(asked) == sorted(wanted)


# --- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_holds_what_has_room_in_plan_order_up_to_its_bytes() -> None:
    half = BATCH_NBYTES // 2
    pieces = [
        (0, 0, half, 0, 0, 0),
        (0, half, half, 0, 0, 0),
        (0, 0, 1, 0, 0, 0),
        (0, 0, 1, 1, 0, 2),
        (0, 1, 1, 1, 0, 2),
    ]
    batches = open_batches(pieces, ["/file"])
    assert [wanted.index for wanted in batches.take()] == [0, 1]
    assert [wanted.index for wanted in batches.take()] == [2]
    later = in_background(batches.take)
    batches.release(1)
    batches.release(2)
    assert [wanted.index for wanted in later.result(10)] == [3, 4]
    assert batches.take() == []


def test_a_batch_that_fails_is_told_piece_by_piece(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(100))
    state = file.stat()
    states = {str(file): (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)}
    records: list[bytes] = []

    def fetch(batch: Any) -> Any:
        yield batch[0].index
        raise RuntimeError("no more")

    pieces = [(0, 0, 50, 0, 0, 0), (0, 90, 20, 0, 50, 0), (0, 0, 1, 0, 0, 0)]
    complaints: list[Exception] = []
    fetch_all(open_batches(pieces, [str(file)]), fetch, states, records.append, complaints.append)
    assert complaints == []  # the file explains it
    assert [RECORD.unpack(record)[:2] for record in records] == [(0, 0), (1, SHORT)]
