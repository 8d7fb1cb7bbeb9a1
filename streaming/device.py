"""Where stored weights live, and how bytes get there: the CPU's memory itself, or a GPU's behind a pinned window.

CPU: direct parameters are views of the reader's final memory; the others lie in one private arena of exactly their
size (huge pages where the system grants them: first touch is the larger part of writing fresh memory). GPU: the window
is page-locked in place (an exact size, where an allocator would round up to a power of two), copies run on a stream of
their own, and each layer carries the event that the compute stream waits for; the host never waits per layer.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch

from layers.weights import ParamSpec
from quant.dtypes import to_torch
from quant.scheme import StoredSpec, empty_stored
from streaming.budget import passing_nbytes
from streaming.errors import BudgetError, OptionError
from streaming.kept_maps import KeptMaps
from streaming.plan import LayerPlan, LoadItem, LoadPlan
from streaming.read_plan import ReadPlan, Region, aligned
from streaming.reader import Reader
from streaming.sizes import format_size

if TYPE_CHECKING:
    from streaming.expert_memory import ExpertMemory

logger = logging.getLogger(__name__)
StoredTensors = dict[str, dict[str, torch.Tensor]]  # parameter -> stored name -> tensor


class Device(Protocol):
    """Memory for the stored weights of one model, and the way bytes take into it."""

    @property
    def torch_device(self) -> torch.device:
        """Where the forward pass computes."""
        ...

    @property
    def stored(self) -> StoredTensors:
        """Every parameter's stored tensors, allocated, filled as items are published."""
        ...

    @property
    def expert_memory(self) -> ExpertMemory | None:
        """The memory of experts that come and go; None where they stay."""
        ...

    def staged(self, item: LoadItem) -> torch.Tensor:
        """The item's bytes in the window: uint8 [nbytes], on the host."""
        ...

    def bring(self, raw: torch.Tensor) -> torch.Tensor:
        """The same bytes on the compute device; the copy may still run."""
        ...

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Around a worker's torch calls: on its own stream where there are streams."""
        ...

    def moment(self) -> Any:
        """An event behind all work issued inside `working()`, or None where work is done when its call returns."""
        ...

    def await_moment(self, moment: Any) -> None:
        """Block the calling worker thread until the moment has come."""
        ...

    def order_after(self, moment: Any) -> None:
        """Make the compute stream wait for the moment; the host goes on."""
        ...

    def compute_moment(self) -> Any:
        """An event behind all that the compute stream has been given so far, or None where that is done."""
        ...

    def hold_back(self, moment: Any) -> None:
        """Make all work that is issued inside `working()` from now on wait for the moment; the host goes on."""
        ...

    def discard(self, param: str) -> None:
        """Give the memory of a parameter back that nothing reads any more."""
        ...

    def make_room(self, layer: LayerPlan | None) -> None:
        """Before a layer's first bytes: give back what earlier layers' passage has left, where memory is short. None:
        no layer is left to come."""
        ...

    def check(self, layer: str) -> None:
        """Raise CheckpointError when memory of the layer is no longer what was loaded (a map of a changed file)."""
        ...

    def close(self) -> None:
        """Let go of page-locked memory; tensors go with their last user."""
        ...


def open_device(name: str, plan: LoadPlan, reader: Reader, *, bounded_experts: bool = False) -> Device:
    """Allocate every stored tensor of the plan on "cpu" or "cuda[:index]". `bounded_experts`: those that the plan loads
    apart come and go, on the CPU."""
    kind = name.partition(":")[0]
    if kind == "cpu":
        return CpuDevice(plan, reader, bounded_experts=bounded_experts)
    if kind == "cuda" and not bounded_experts:
        return CudaDevice(name, plan, reader)
    raise OptionError(f"--device {name}: known devices are cpu and cuda[:index]")


def _params(plan: LoadPlan) -> Iterator[ParamSpec]:
    return (param for layer in plan.all_layers for param in layer.spec.params)


class CpuDevice:
    """Stored tensors in the CPU's memory: some in the reader's, the rest in an arena of this process."""

    def __init__(self, plan: LoadPlan, reader: Reader, *, bounded_experts: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self.expert_memory = _expert_memory(plan) if bounded_experts else None
        apart = {} if self.expert_memory is None else self.expert_memory.tensors
        self._reader_plan = reader.read_plan
        final, window = reader.memory(Region.FINAL), reader.memory(Region.WINDOW)
        self._window = None if window is None else torch.frombuffer(window, dtype=torch.uint8)
        self._final = final
        self.stored = _views_of_final(plan, reader.read_plan, final)
        in_place = {*reader.read_plan.final_offsets, *reader.read_plan.mapped}
        in_place |= {(param, name) for param, tensors in apart.items() for name in tensors}
        self._arena = Arena(_without(plan, in_place))
        for name, tensors in self._arena.tensors.items():
            self.stored.setdefault(name, {}).update(tensors)
        self.stored.update(apart)
        self._maps = KeptMaps(plan, reader.read_plan) if reader.read_plan.mapped else None  # last: it opens files
        if self._maps is not None:
            _add_views_of_files(self.stored, plan, reader.read_plan, self._maps.maps)

    def staged(self, item: LoadItem) -> torch.Tensor:
        return _staged(self._window, self._reader_plan, item)

    def bring(self, raw: torch.Tensor) -> torch.Tensor:
        return raw

    def working(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def moment(self) -> Any:
        return None

    def await_moment(self, moment: Any) -> None:
        """Nothing to wait for: a CPU's work is done when its call returns."""

    def order_after(self, moment: Any) -> None:
        """Nothing to order."""

    def compute_moment(self) -> Any:
        return None

    def hold_back(self, moment: Any) -> None:
        """Nothing to hold back."""

    def discard(self, param: str) -> None:
        for name, tensor in self.stored.pop(param).items():
            offset = self._reader_plan.final_offsets.get((param, name))
            if offset is not None and self._final is not None:
                give_back(self._final, offset, tensor.nbytes, shared=True)
        self._arena.discard(param)

    def make_room(self, layer: LayerPlan | None) -> None:
        """Nothing is kept aside: the window is used again."""

    def check(self, layer: str) -> None:
        if self._maps is not None:
            self._maps.check(layer)

    def close(self) -> None:
        self._window = self._final = None
        self.stored = {}
        self._arena.close()
        if self._maps is not None:
            self._maps.close()


def _expert_memory(plan: LoadPlan) -> ExpertMemory:
    from streaming.expert_memory import ExpertMemory

    return ExpertMemory(plan.experts)


def _without(plan: LoadPlan, in_place: Collection[tuple[str, str]]) -> dict[str, dict[str, StoredSpec]]:
    """Of every parameter the stored tensors that do not lie in the reader's memory or in a file; parameters of which
    nothing is left are left out."""
    found: dict[str, dict[str, StoredSpec]] = {}
    for param in _params(plan):
        rest = {name: spec for name, spec in param.storage().items() if (param.name, name) not in in_place}
        if rest:
            found[param.name] = rest
    return found


def give_back(memory: mmap.mmap, offset: int, nbytes: int, *, shared: bool) -> None:
    """Give the whole pages of a run of memory back to the system; it reads as zeros afterwards. `shared`: by a
    descriptor, so that other maps of it lose them too."""
    start, stop = whole_pages(offset, nbytes)
    advice = getattr(mmap, "MADV_REMOVE" if shared else "MADV_DONTNEED", None)
    if stop > start and advice is not None:
        with contextlib.suppress(OSError):  # a reader of this process has private memory in the place of shared
            memory.madvise(advice, start, stop - start)


def whole_pages(start: int, nbytes: int) -> tuple[int, int]:
    """Where the whole pages within a run of bytes begin and end; the end is before the begin where there is none."""
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE


def _staged(window: torch.Tensor | None, read_plan: ReadPlan, item: LoadItem) -> torch.Tensor:
    assert window is not None
    start = read_plan.window_offsets[item.index]
    return window[start : start + item.nbytes]


def _views_of_final(plan: LoadPlan, read_plan: ReadPlan, final: mmap.mmap | None) -> StoredTensors:
    # Without that memory there are at most tensors of no rows: what a rank beyond the last row of a vocabulary has.
    whole = torch.empty(0, dtype=torch.uint8) if final is None else torch.frombuffer(final, dtype=torch.uint8)
    found: StoredTensors = {}
    for param in _params(plan):
        for name, spec in param.storage().items():
            if (param.name, name) in read_plan.final_offsets:
                view = view_of(whole, read_plan.final_offsets[param.name, name], spec)
                found.setdefault(param.name, {})[name] = view
    return found


def _add_views_of_files(
    stored: StoredTensors, plan: LoadPlan, read_plan: ReadPlan, maps: Mapping[int, mmap.mmap]
) -> None:
    wholes = {file: torch.frombuffer(found, dtype=torch.uint8) for file, found in maps.items()}
    for param in _params(plan):
        for name, spec in param.storage().items():
            if (place := read_plan.mapped.get((param.name, name))) is not None:
                stored.setdefault(param.name, {})[name] = view_of(wholes[place[0]], place[1], spec)


class Arena:
    """Uninitialized tensors for {parameter: {name: spec}}, all in one anonymous mapping of exactly the size needed."""

    def __init__(self, storage: Mapping[str, Mapping[str, StoredSpec]]) -> None:
        self._places: dict[str, list[tuple[int, int]]] = {param: [] for param in storage}
        self.tensors: StoredTensors = {param: {} for param in storage}
        end = 0
        for param, specs in storage.items():
            for spec in specs.values():
                self._places[param].append((end, spec.nbytes))
                end += aligned(spec.nbytes)
        self._memory = _huge_memory(end) if end else None
        whole = torch.empty(0, dtype=torch.uint8) if self._memory is None else _bytes_of(self._memory)
        for param, specs in storage.items():
            for (name, spec), (offset, _) in zip(specs.items(), self._places[param], strict=True):
                self.tensors[param][name] = view_of(whole, offset, spec)

    def discard(self, param: str) -> None:
        """Give the memory of a parameter back that nothing reads any more; nothing where it has none here."""
        self.tensors.pop(param, None)
        for offset, nbytes in self._places.pop(param, ()):
            if self._memory is not None:
                give_back(self._memory, offset, nbytes, shared=False)

    def close(self) -> None:
        """Let go of the memory, which goes with the last tensor."""
        self.tensors, self._memory = {}, None


def _bytes_of(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _huge_memory(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # not every kernel is built with them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def own_memory(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of memory that goes back to the system with the tensor."""
    return _bytes_of(_huge_memory(nbytes)) if nbytes else torch.empty(0, dtype=torch.uint8)


def view_of(memory: torch.Tensor, offset: int, spec: StoredSpec) -> torch.Tensor:
    """A tensor of this spec at an offset of a uint8 tensor."""
    return memory[offset : offset + spec.nbytes].view(to_torch(spec.dtype)).view(spec.shape)


# --- CUDA
#
# Who runs on which stream: copies, conversions and quantization on one side stream, whatever thread issues them, so
# their temporaries are allocated, used and freed in that stream's order; the forward pass on its own thread's current
# stream. What both touch are the stored tensors alone: allocated before either begins, kept until the side stream is
# idle, written by the one, and read by the other only behind the event of the layer. So nothing needs record_stream.


class _PinnedWindow:
    """The reader's window, page-locked where it lies: only from such memory is a copy truly asynchronous."""

    def __init__(self, window: torch.Tensor, device: torch.device) -> None:
        self.bytes = window
        code = _page_lock(window, device)
        if code != 0:
            raise MemoryError(
                f"page-locking the window of {format_size(window.numel())} failed with CUDA error {code}: "
                "try a smaller --window"
            )

    def close(self) -> None:
        """No copy may be running: a page that is let go while the device reads it is a fault."""
        _page_unlock(self.bytes, "window's")


def _page_lock(memory: torch.Tensor, device: torch.device) -> int:
    with torch.cuda.device(device):
        return int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE))


def _page_unlock(memory: torch.Tensor, whose: str) -> None:
    code = int(_cudart().cudaHostUnregister(memory.data_ptr()))
    if code != 0:
        logger.warning("the %s page lock could not be given back: CUDA error %d", whose, code)


_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


def _cudart() -> Any:
    return torch.cuda.cudart()


def cuda_device(name: str) -> torch.device:
    """ "cuda" (which is cuda:0, whatever a thread's current device is) or "cuda:1". Raises OptionError."""
    if not torch.cuda.is_available():
        raise OptionError(f"--device {name}: torch {torch.__version__} finds no CUDA device; --device cpu runs here")
    count = torch.cuda.device_count()
    kind, colon, index = name.partition(":")
    index = index if colon else "0"
    if kind != "cuda" or not index.isdecimal() or int(index) >= count:
        raise OptionError(f"--device {name}: the devices here are {', '.join(f'cuda:{i}' for i in range(count))}")
    return torch.device("cuda", int(index))


def check_room(name: str, *, needed: int, free: int, total: int) -> None:
    """Refuse weights that a device has no memory for. Raises BudgetError with both numbers."""
    if needed > free:
        raise BudgetError(
            f"--device {name}: the weights take {format_size(needed)}, but {format_size(free)} of its "
            f"{format_size(total)} are free: try --quantization, or end what else runs there"
        )


def gives_back(*, free: int, cached: int, needed: int, unified: bool) -> bool:
    """Whether the allocator's `cached` bytes go back to the driver before a layer that takes `needed` on its way in:
    where less is free. The driver waits for the whole device when it takes memory, so it is not done for nothing.
    Always where the device's memory is the host's (`unified`): the reader and the window live there too."""
    return cached > 0 and (unified or free < needed)


class CudaDevice:
    """Stored tensors on a GPU; every item goes through the page-locked window on a stream of its own."""

    expert_memory: ExpertMemory | None = None

    def __init__(self, name: str, plan: LoadPlan, reader: Reader) -> None:
        self.torch_device = cuda_device(name)
        self._check_room(plan.kept_nbytes + (0 if plan.stream is None else plan.stream.ring_nbytes))
        self._read_plan = reader.read_plan
        self._stream = torch.cuda.Stream(self.torch_device)
        self.stored: StoredTensors = {
            param.name: empty_stored(param.storage(), device=self.torch_device) for param in _params(plan)
        }
        # Memory that an earlier model gave back may still be in use on the stream it came from: once, before the first
        # copy, all of that is awaited.
        torch.cuda.current_stream(self.torch_device).synchronize()
        window = reader.memory(Region.WINDOW)  # last: what is page-locked must be let go, so nothing may fail behind it
        found = None if window is None else torch.frombuffer(window, dtype=torch.uint8)
        self._pinned = None if found is None else _PinnedWindow(found, self.torch_device)

    def _check_room(self, needed: int) -> None:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        check_room(str(self.torch_device), needed=needed, free=free + self._cached(), total=total)

    def _cached(self) -> int:
        """Bytes that torch's allocator holds and nobody uses."""
        return torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)

    def staged(self, item: LoadItem) -> torch.Tensor:
        return _staged(self._pinned.bytes if self._pinned else None, self._read_plan, item)

    def bring(self, raw: torch.Tensor) -> torch.Tensor:
        """From the window the copy runs on behind the call. From other memory (what the CPU decoded) CUDA has read all
        of it when the call returns, so the source may go."""
        return raw.to(self.torch_device, non_blocking=True)

    def working(self) -> contextlib.AbstractContextManager[None]:
        return torch.cuda.stream(self._stream)

    def moment(self) -> Any:
        event = torch.cuda.Event(blocking=True)  # who waits must not spin on a core
        event.record(self._stream)
        return event

    def await_moment(self, moment: Any) -> None:
        if moment is not None:
            moment.synchronize()

    def order_after(self, moment: Any) -> None:
        if moment is not None:
            torch.cuda.current_stream(self.torch_device).wait_event(moment)

    def compute_moment(self) -> Any:
        # The current stream of every thread of ours is the device's default one, outside of `working()`: the forward
        # thread computes on it, and whoever else asks means the same.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def hold_back(self, moment: Any) -> None:
        if moment is not None:
            self._stream.wait_event(moment)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy between the host and the device on the caller's current stream; both must stay until it ends."""
        target.copy_(source, non_blocking=True)

    def page_lock(self, memory: torch.Tensor) -> int:
        """Page-lock memory of the host where it lies, for copies that are truly asynchronous: 0, or CUDA's error code
        where that was refused. What is locked must be unlocked before its last tensor goes, and no copy may run
        then."""
        return _page_lock(memory, self.torch_device)

    def page_unlock(self, memory: torch.Tensor) -> None:
        """Give the page lock back."""
        _page_unlock(memory, "memory's")

    def discard(self, param: str) -> None:
        self.order_after(self.moment())  # what was never computed with may still be on its way
        del self.stored[param]  # its last reader is the forward pass, in whose order the memory is used again

    def make_room(self, layer: LayerPlan | None) -> None:
        cached = self._cached()
        if cached == 0:
            return
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        unified = bool(torch.cuda.get_device_properties(self.torch_device).is_integrated)
        needed = 0 if layer is None else passing_nbytes(layer)
        if gives_back(free=free, cached=cached, needed=needed, unified=unified):
            torch.cuda.empty_cache()

    def check(self, layer: str) -> None:
        """Nothing to look at: it is all on the device."""

    def close(self) -> None:
        self._stream.synchronize()
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        self.stored = {}
