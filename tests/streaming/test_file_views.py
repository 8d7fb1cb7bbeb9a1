"""Streamed weights that are used where they lie in the page cache (`lazy`): the same bits, and nothing is copied."""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from layers.sampling_params import SamplingParams
from quant.row_parts import RowParts
from streaming import LLM, LayerLoadError
from streaming.device import own_memory
from streaming.file_views import FileView, FileViews, give_pages_back, map_run, view_run
from streaming.page_cache import is_cached
from streaming.unit_memory import Place
from streaming.weight_stream import WeightStream
from tests.layers.tiny import some_ids
from tests.streaming.leftovers import open_descriptors
from tests.streaming.limits import limit_of
from tests.streaming.waiting import until

IDS = some_ids(7, vocab_size=101, seed=1)
SIZE = 5 * mmap.PAGESIZE + 1234
LAZY = {"safetensors_load_strategy": "lazy", "reader": "threads", "max_model_len": 64}
Tiny = Callable[[TinyModel], Path]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "bytes"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    descriptor = os.open(path, os.O_RDWR)
    if not is_cached(descriptor, 0, SIZE):
        pytest.skip("this file system does not say what is in the page cache")
    yield descriptor
    os.close(descriptor)


# --- views


def view_of_run(descriptor: int, offset: int, nbytes: int, *, reads: bool = False) -> FileView | None:
    memory = map_run(descriptor, offset, nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
    if memory is None:
        return None
    view = FileView(memory, descriptor, lambda: None)
    came = view_run(view, descriptor, offset, before=lambda: None, reads=reads)
    return None if came is None else came.view


def resident_nbytes(path: str) -> int:
    """Bytes of the maps of a file that have pages in this process."""
    found = 0
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        is_wanted = False
        for line in lines:
            if "-" in line.split(" ", 1)[0]:
                is_wanted = line.rstrip().endswith(path)
            elif is_wanted and line.startswith("Rss:"):
                found += int(line.split()[1]) << 10
    return found


def test_any_run_of_a_file_that_is_in_the_cache(file: int) -> None:
    whole, chance, before = os.pread(file, SIZE, 0), random.Random(1), open_descriptors()
    for _ in range(100):
        first, last = sorted(chance.sample(range(SIZE + 1), k=2))
        view = view_of_run(file, first, last - first)
        assert view is not None
        assert bytes(view.memory.tolist()) == whole[first:last]
    del view
    gc.collect()
    assert open_descriptors().items() <= before.items()


def test_no_view_of_what_is_not_there(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert view_of_run(file, SIZE + mmap.PAGESIZE, 11) is None
    assert view_of_run(file, 5, 0) is None
    monkeypatch.setattr("streaming.file_views.is_cached", lambda descriptor, offset, nbytes: True)
    assert view_of_run(file, SIZE + mmap.PAGESIZE, 5) is None  # cut behind the look at it
    os.ftruncate(file, mmap.PAGESIZE)
    assert view_of_run(file, 100, SIZE - 100) is None


def test_what_the_cache_has_not_is_read_where_that_is_wanted(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming.file_views.is_cached", lambda descriptor, offset, nbytes: False)
    assert view_of_run(file, 10, 100) is None
    view = view_of_run(file, 10, 100, reads=True)
    assert view is not None
    assert bytes(view.memory.tolist()) == os.pread(file, 100, 10)


def test_pages_go_and_come_again(tmp_path: Path) -> None:
    path, nbytes = tmp_path / "pages-go-and-come", 8 << 20
    path.write_bytes(random.Random(0).randbytes(nbytes))
    with path.open("rb") as opened:
        view = view_of_run(opened.fileno(), 5000, nbytes - 9000, reads=True)
        assert view is not None
        for _ in range(3):
            assert view.come()
            assert resident_nbytes(str(path)) >= nbytes - 9000
            view.go()
            assert resident_nbytes(str(path)) == 0
        assert bytes(view.memory[:100].tolist()) == os.pread(opened.fileno(), 100, 5000)  # also without them


def test_a_stray_write_does_not_reach_the_file(file: int) -> None:
    view, before = view_of_run(file, 10, 100), os.pread(file, 100, 10)
    assert view is not None
    view.memory.fill_(7)
    assert os.pread(file, 100, 10) == before


def test_only_whole_pages_are_given_back() -> None:
    page = mmap.PAGESIZE
    memory = own_memory(4 * page).fill_(1)
    give_pages_back(memory[100 : 3 * page + 5])
    assert memory[:page].all()
    assert not memory[page : 3 * page].any()
    assert memory[3 * page :].all()
    give_pages_back(memory[10:20])
    assert memory[10:20].all()


# --- a model


@pytest.fixture
def folder(tiny_folder: Tiny) -> Path:
    return tiny_folder(TinyModel(layers=6))


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """The same, of the test alone."""
    return Path(shutil.copytree(folder, tmp_path / "own"))


@pytest.fixture(params=["lazy", None])
def of_own(request: pytest.FixtureRequest, own: Path) -> Iterator[LLM]:
    """All of it passes through."""
    options = LAZY | {"safetensors_load_strategy": request.param}
    with LLM(own, memory=limit_of(own, 0.0, **options), **options) as llm:
        yield llm


def stream_of(llm: LLM) -> WeightStream:
    stream = llm.model.runner.stream
    assert stream is not None
    return stream


@pytest.fixture
def by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are brought by threads all the time: the forward pass takes over from none of them."""
    monkeypatch.setattr("streaming.units_in_place.UnitsInPlace.begin", lambda *_, **__: False)


def answers(llm: LLM) -> tuple[torch.Tensor, tuple[int, ...]]:
    return llm.logits(IDS), llm.complete([IDS], SamplingParams(max_tokens=6, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_bits_are_those_of_the_whole_model(tiny_folder: Tiny, dtype: str, tied: bool, share: float) -> None:
    folder = tiny_folder(TinyModel(layers=5, dtype=dtype, tied=tied))
    with LLM(folder, max_model_len=64) as llm:
        expected = answers(llm)
    limit = limit_of(folder, share, **LAZY)
    with LLM(folder, memory=limit, **LAZY) as llm:
        for _ in range(2):
            found = answers(llm)
            assert torch.equal(found[0], expected[0])
            assert found[1] == expected[1]
        assert llm.stats().peak_budget_bytes <= limit
        counts = stream_of(llm).counts
        mapped, passed = llm.tracer.nbytes("map") + counts.in_place_nbytes, counts.streamed_nbytes
        assert mapped >= passed if dtype == "bfloat16" else mapped < passed  # float32 that is not aligned is moved


@pytest.mark.parametrize(("strategy", "maps"), [("lazy", True), (None, True), ("direct", False)])
def test_what_passes_through_is_copied_where_that_was_asked_for(folder: Path, strategy: str | None, maps: bool) -> None:
    limit = limit_of(folder, 0.0, max_model_len=64)
    with LLM(folder, memory=limit, **LAZY | {"safetensors_load_strategy": strategy}) as llm:
        llm.wait_loaded()
        llm.logits(IDS)
        before = llm.tracer.nbytes("read")
        llm.logits(IDS)
        llm.logits(IDS)
        read, mapped = llm.tracer.nbytes("read") - before, llm.tracer.nbytes("map")
        mapped += stream_of(llm).counts.in_place_nbytes
        streamed = stream_of(llm).plan.pass_nbytes
    assert (read == 0, mapped >= 2 * streamed) == (maps, maps)


@pytest.mark.parametrize(("strategy", "maps"), [("lazy", True), (None, False)])
def test_a_file_that_cannot_be_leased_is_used_where_it_lies_only_where_that_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, strategy: str | None, maps: bool
) -> None:
    monkeypatch.setattr("streaming.file_leases._leased", lambda descriptor, state: None)
    limit = limit_of(folder, 0.0, max_model_len=64)
    with LLM(folder, memory=limit, **LAZY | {"safetensors_load_strategy": strategy}) as llm:
        spared: list[Place] = []
        monkeypatch.setattr(Place, "spare", lambda place: spared.append(place))
        llm.logits(IDS)
        llm.logits(IDS)
        assert (llm.tracer.nbytes("map") > 0) == maps
        assert bool(spared) == maps  # else the ring's memory would come anew for each copy


def test_a_file_that_was_rewritten_between_passes_gives_no_wrong_numbers(of_own: LLM, own: Path) -> None:
    of_own.logits(IDS)
    of_own.logits(IDS)
    for file in own.glob("*.safetensors"):
        with file.open("r+b") as out:
            out.seek(-1000, os.SEEK_END)
            out.write(bytes(500))
    with pytest.raises(LayerLoadError, match=r"was changed, or replaced|is opened for writing"):
        of_own.logits(IDS)


def test_a_file_that_somebody_opens_and_does_not_write_to_goes_on(of_own: LLM, own: Path) -> None:
    goes_on_while_files_are_opened(of_own, own)


def goes_on_while_files_are_opened(llm: LLM, folder: Path) -> None:
    expected = llm.logits(IDS)
    for _ in range(3):
        for file in folder.glob("*.safetensors"):
            file.open("r+b").close()
        assert torch.equal(llm.logits(IDS), expected)


@pytest.mark.usefixtures("by_threads")
def test_a_unit_is_left_when_it_was_used_whoever_takes_its_pages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind an error, when no worker is left: who wants to write does not wait for one."""
    with LLM(folder, memory=limit_of(folder, 0.0, **LAZY), **LAZY) as llm:
        stream = stream_of(llm)
        llm.logits(IDS)
        monkeypatch.setattr(Place, "let_go", lambda place: None)
        with stream.lease_unit(stream.plan.streamed[0], stop=lambda: None):
            place = stream._live[stream.plan.streamed[0].name].place
            assert place.leave_views is not None
        assert place.leave_views is None


@pytest.mark.parametrize("strategy", ["lazy", None])
def test_nothing_is_left_of_a_closed_model_that_somebody_holds(folder: Path, strategy: str | None) -> None:
    options = LAZY | {"safetensors_load_strategy": strategy}
    llm = LLM(folder, memory=limit_of(folder, 0.0, **options), **options)
    llm.logits(IDS)
    llm.logits(IDS)
    llm.close()
    gc.collect()
    files = [str(file) for file in folder.glob("*.safetensors")]
    assert not [
        line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if line.endswith(tuple(files))
    ]
    assert not set(files) & set(open_descriptors().values())


def run_for_ever(llm: LLM) -> None:
    while True:
        llm.logits(IDS)


@pytest.mark.parametrize("strategy", ["lazy", None])
@pytest.mark.parametrize("seed", range(6))
def test_a_file_cut_at_any_moment_ends_the_run_and_not_the_process(
    tiny_folder: Tiny, tmp_path: Path, strategy: str | None, seed: int
) -> None:
    own = Path(shutil.copytree(tiny_folder(TinyModel(layers=6, hidden_size=256)), tmp_path / "own"))
    options = LAZY | {"safetensors_load_strategy": strategy}
    with LLM(own, memory=limit_of(own, 0.0, **options), **options) as llm:
        llm.logits(IDS)
        if not llm.tracer.nbytes("map") + llm.tracer.nbytes("read"):
            pytest.skip("nothing is used where it lies")
        cutting = threading.Timer(
            0.001 * random.Random(seed).uniform(0, 60), lambda: [cut(f) for f in own.glob("*.saf*")]
        )
        cutting.start()
        with pytest.raises(LayerLoadError, match=r"was changed, or replaced|is opened for writing|ended before"):
            run_for_ever(llm)
        cutting.join(timeout=30)
        assert not cutting.is_alive()


@pytest.mark.parametrize("scheme", ["int8_per_channel", "fp8_per_channel", "int4_per_group"])
def test_stored_forms_are_used_where_the_cache_has_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr("streaming.stored_cache.data_file.SETTLED_NS", 0)
    options = LAZY | {"quantization": scheme, "cache_dir": str(tmp_path / "cache")}
    with LLM(folder, max_model_len=64, quantization=scheme) as llm:
        expected = answers(llm)
    with LLM(folder, memory=limit_of(folder, 0.2, **options), **options) as llm:
        for _ in range(3):
            found = answers(llm)
            assert torch.equal(found[0], expected[0])
            assert found[1] == expected[1]
        read, mapped = llm.tracer.nbytes("read"), llm.tracer.nbytes("map")
        llm.logits(IDS)
        streamed = stream_of(llm).plan.pass_nbytes
        assert llm.tracer.nbytes("map") - mapped > streamed // 2
        assert llm.tracer.nbytes("read") - read < streamed // 2


def test_projections_that_lie_apart_are_not_joined(folder: Path) -> None:
    with LLM(folder, memory=limit_of(folder, 0.0, **LAZY), **LAZY) as llm:
        stream, found = stream_of(llm), {}
        llm.logits(IDS)
        for unit in stream.units[:4]:
            with stream.lease_unit(unit, stop=lambda: None) as leased:
                found[unit.name.rpartition("layers.0.")[2]] = type(leased)
    assert found == {
        "self_attn.qkv_proj.weight": RowParts,  # between them in the file is o_proj
        "self_attn.o_proj.weight": dict,
        "mlp.gate_up_proj.weight": dict,
        "mlp.down_proj.weight": dict,
    }


@pytest.mark.usefixtures("by_threads")
def test_pages_go_behind_the_lease_and_come_again_whoever_has_them_in_hand(folder: Path) -> None:
    """What is mapped all the time counts as memory only while it is used."""
    with LLM(folder, memory=limit_of(folder, 0.0, **LAZY), **LAZY) as llm:
        stream = stream_of(llm)
        llm.logits(IDS)
        gone: set[str] = set()
        go = FileViews.go
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileViews, "go", lambda views: (go(views), gone.add(id(views)))[0])
            for unit in stream.units[:4]:
                with stream.lease_unit(unit, stop=lambda: None) as leased:
                    views = stream._live[unit.name].place.views
                    assert views is not None
                    assert id(views) not in gone
                until(lambda views=views: id(views) in gone)
                assert leased is not None
                weight = leased[:] if isinstance(leased, RowParts) else leased["weight"]
                assert weight.isfinite().all()


def test_the_pages_of_a_pass_are_no_more_than_its_room(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=8, hidden_size=512, intermediate_size=2048))
    with LLM(folder, memory=limit_of(folder, 0.0, **LAZY), **LAZY) as llm:
        llm.logits(IDS)
        llm.logits(IDS)
        plan, files = stream_of(llm).plan, list(folder.glob("*.safetensors"))
        most = plan.ring_nbytes + len(files) * (4 << 20)  # pages of 2 MiB may hold more than what is used of them
        assert sum(resident_nbytes(str(file)) for file in files) <= most
        assert plan.pass_nbytes > 2 * most


def test_what_stays_is_in_memory_of_its_own(folder: Path) -> None:
    with LLM(folder, memory=limit_of(folder, 0.6, **LAZY), **LAZY) as llm:
        llm.logits(IDS)
        llm.logits(IDS)
        stream = stream_of(llm)
        kept = [unit for unit in stream.units if unit.name in stream.plan.kept]
        assert kept
        assert not [unit.name for unit in kept if unit.name in stream._own and stream._own[unit.name].place.views]


@pytest.mark.parametrize("exceeds", [False, True])
def test_what_is_not_in_the_cache_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch, exceeds: bool) -> None:
    chance = random.Random(0)
    with LLM(folder, max_model_len=64) as llm:
        expected = answers(llm)
    for module in ("file_views", "item_bytes"):
        monkeypatch.setattr(f"streaming.{module}.is_cached", lambda *run: chance.random() < 0.5 and is_cached(*run))
    if exceeds:  # what memory there is, so that nothing is read through a map
        monkeypatch.setattr("streaming.open_stream.exceeds_memory", lambda *_: True)
    with LLM(folder, memory=limit_of(folder, 0.2, **LAZY), **LAZY) as llm:
        for _ in range(4):  # the ring's memory is given back and written to again
            found = answers(llm)
            assert torch.equal(found[0], expected[0])
            assert found[1] == expected[1]
        assert llm.tracer.nbytes("map") > 0


def test_the_same_tokens_while_the_limit_changes(folder: Path) -> None:
    with LLM(folder, max_model_len=64) as llm:
        expected = answers(llm)
    limits = [limit_of(folder, share, **LAZY) for share in (0.1, 0.3, 0.6, 0.9)]
    with LLM(folder, memory=limits[0], **LAZY) as llm:
        for limit in random.Random(0).choices(limits, k=20):
            llm.set_memory(limit)
            found = answers(llm)
            assert torch.equal(found[0], expected[0])
            assert found[1] == expected[1]


def rewritten(file: Path) -> None:
    """Longer than it was: nothing is cut away under a map."""
    with file.open("ab") as out:
        out.write(b"x")


def cut(file: Path) -> None:
    os.truncate(file, 100)


@pytest.mark.usefixtures("by_threads")
@pytest.mark.parametrize("change", [rewritten, cut])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_file_that_changes_under_its_maps_ends_the_run_before_they_are_used(
    own: Path, share: float, change: Callable[[Path], None]
) -> None:
    with LLM(own, memory=limit_of(own, share, **LAZY), **LAZY) as llm:
        llm.logits(IDS)
        stream = stream_of(llm)
        first = stream.plan.streamed[0]
        until(lambda: first.name in stream._live and stream._live[first.name].place.views is not None)
        for file in own.glob("*.safetensors"):
            change(file)
        changed = r"stage read, tensor model.layers.*model-0000[12].* was changed, or replaced"
        with pytest.raises(LayerLoadError, match=changed), stream.lease_unit(first, stop=lambda: None):
            pass
        with pytest.raises(LayerLoadError, match=r"was changed, or replaced"):
            llm.logits(IDS)


@pytest.mark.usefixtures("by_threads")
def test_the_tensor_and_the_file_that_changed_are_named(tiny_folder: Tiny, tmp_path: Path) -> None:
    own = Path(shutil.copytree(tiny_folder(TinyModel(layers=3, files=1)), tmp_path / "own"))
    apart = "model.layers.0.self_attn.v_proj.weight"
    tensors = load_file(own / "model.safetensors")
    save_file({apart: tensors.pop(apart)}, own / "b.safetensors", metadata={"format": "pt"})
    save_file(tensors, own / "a.safetensors", metadata={"format": "pt"})
    (own / "model.safetensors").unlink()
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {apart: "b.safetensors"}
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with LLM(own, memory=limit_of(own, 0.0, **LAZY), **LAZY) as llm:
        llm.logits(IDS)
        stream = stream_of(llm)
        first = stream.plan.streamed[0]
        until(lambda: first.name in stream._live and stream._live[first.name].place.parts is not None)
        rewritten(own / "b.safetensors")
        changed = rf"tensor {apart}: .*/b\.safetensors was changed"
        with pytest.raises(LayerLoadError, match=changed), stream.lease_unit(first, stop=lambda: None):
            pass


@pytest.mark.parametrize(("strategy", "copies"), [("lazy", False), ("direct", True)])
def test_a_core_is_left_to_who_copies_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, copies: bool
) -> None:
    for name, value in {"TIMED_NBYTES": 1, "RATED_NBYTES": 1 << 16, "MEMORY_RATE": 1}.items():
        monkeypatch.setattr(f"streaming.unit_loading.{name}", value)
    options: dict[str, Any] = LAZY | {"safetensors_load_strategy": strategy}
    with LLM(folder, memory=limit_of(folder, 0.0, **options), **options) as llm:
        llm.wait_loaded()
        llm.logits(IDS)
        llm.logits(IDS)
        assert stream_of(llm).loading.copies == copies
