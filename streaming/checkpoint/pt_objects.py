"""What the pickle of a PyTorch checkpoint may name, and what that becomes here: tensors as descriptions. [no-torch]

Nothing of PyTorch is called or imported. A tensor's rebuilding call is read as data (torch/_utils.py has the functions
that it names): which storage, from which element on, of which shape and strides. Every other global is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard

from quant.dtypes import DType

_LARGEST = 2**63 - 1  # no file, and no tensor, can be larger
_MOST_DIMS = 64  # torch's own limit is the same


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle refers to, such as torch.FloatStorage; it is never looked up."""

    name: str


@dataclass(frozen=True, slots=True)
class Storage:
    """A run of numbers that tensors are views of; `dtype` None: bytes."""

    key: str
    dtype: DType | None
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return self.count * (self.dtype.itemsize if self.dtype else 1)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of a storage; offset and strides in elements of `dtype`."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Ignored:
    """A value that is no tensor and that nobody asks for (a device, a set, encoded bytes)."""


def allow_global(module: str, name: str) -> Global:
    """The named global; ValueError, with its name, for one that no checkpoint of plain tensors needs."""
    full = f"{module}.{name}"
    full = full.replace("__builtin__.", "builtins.", 1) if full.startswith("__builtin__.") else full
    if full in _CALLS or full in _STORAGES or full in _DTYPES or full in _TENSOR_TYPES or full == _FROM_TYPE:
        return Global(full)
    if words := _UNSUPPORTED.get(full):
        raise ValueError(f"it holds {words} ({full}), which is not supported")
    if full.startswith("torch.Q") and full.endswith("Storage"):
        raise ValueError(f"it holds a quantized tensor ({full}), which is not supported")
    raise ValueError(
        f"its pickle asks for {full[:200]!r}, which is refused: only plain tensors are read, nothing is run"
    )


def call_global(function: object, args: object) -> object:
    """What a call that the pickle asks for stands for. ValueError where it is none that is known, or its arguments are
    not what torch.save writes."""
    if not isinstance(function, Global) or not isinstance(args, tuple):
        raise ValueError(f"its pickle calls {_named(function)}, which is refused")
    if function.name == _FROM_TYPE:
        return _from_type(args)
    if function.name not in _CALLS:
        raise ValueError(f"its pickle calls {function.name}, which is refused")
    return _CALLS[function.name](args)


def make_storage(reference: object) -> Storage:
    """A persistent id ("storage", type, key, location, count[, view]) as a Storage. Raises ValueError."""
    if not isinstance(reference, tuple) or len(reference) not in (5, 6) or reference[0] != "storage":
        raise ValueError("a persistent id of its pickle is not that of a storage")
    _, kind, key, _, count, *view = reference
    if not isinstance(kind, Global) or kind.name not in _STORAGES:
        raise ValueError(f"a storage of unknown type {_named(kind)}")
    if not isinstance(key, str) or not _is_count(count):
        raise ValueError("a storage whose key is no text or whose size is no number from 0 up")
    if view and view[0] is not None:
        raise ValueError("a storage that is a view of another (PyTorch before 0.4 wrote these), which is not supported")
    return Storage(key, _STORAGES[kind.name], count)


def _from_type(args: tuple[object, ...]) -> object:
    """_rebuild_from_type_v2: a tensor with attributes of its own, which are left out, or of a class of its own."""
    if len(args) != 4:
        raise ValueError("a tensor's rebuilding call has not the 4 arguments of _rebuild_from_type_v2")
    function, kind, inner, _ = args
    if not isinstance(kind, Global) or kind.name not in _TENSOR_TYPES:
        raise ValueError(f"it holds a tensor of its own class, {_named(kind)}, which is not supported")
    if not isinstance(function, Global) or function.name not in _REBUILDS:
        raise ValueError(f"it rebuilds a tensor through {_named(function)}, which is refused")
    return call_global(function, inner)


def _tensor(args: tuple[object, ...]) -> StoredTensor:
    """_rebuild_tensor(storage, offset, size, stride); _v2 adds requires_grad, hooks, and metadata."""
    if len(args) not in (4, 6, 7):
        raise ValueError(f"a tensor's rebuilding call has {len(args)} arguments")
    storage = args[0]
    if isinstance(storage, Storage) and storage.dtype is None:
        raise ValueError("a tensor of a storage that is plain bytes, without a dtype")
    return _view(args[:4], storage.dtype if isinstance(storage, Storage) else None, args[6:])


def _tensor_v3(args: tuple[object, ...]) -> StoredTensor:
    """_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])."""
    if len(args) not in (7, 8):
        raise ValueError(f"a tensor's rebuilding call has {len(args)} arguments")
    kind = args[6]
    if not isinstance(kind, Global) or kind.name not in _DTYPES:
        raise ValueError(f"a tensor of unknown dtype {_named(kind)}")
    return _view(args[:4], _DTYPES[kind.name], args[7:])


def _view(args: tuple[object, ...], dtype: DType | None, metadata: tuple[object, ...]) -> StoredTensor:
    storage, offset, shape, strides = args
    if not isinstance(storage, Storage) or dtype is None:
        raise ValueError("a tensor without a storage")
    if any(metadata):
        raise ValueError("it holds a conjugated or negated view, which is not supported")
    if not _is_count(offset) or not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides):
        raise ValueError("a tensor whose offset, shape and strides are not numbers from 0 up, one stride for each dim")
    if len(shape) > _MOST_DIMS:
        raise ValueError(f"a tensor of {len(shape)} dims; at most {_MOST_DIMS} are possible")
    _check_size(shape)
    return StoredTensor(storage, dtype, offset, shape, strides)


def _check_size(shape: tuple[int, ...]) -> None:
    product = 1
    for dim in shape:
        product *= max(dim, 1)
        if product > _LARGEST // 8:
            raise ValueError(f"a tensor of shape {list(shape)}: it overflows, no file holds so many bytes")


def _parameter(args: tuple[object, ...]) -> StoredTensor:
    """_rebuild_parameter(data, requires_grad, hooks); _with_state adds attributes, which are left out."""
    if len(args) not in (3, 4) or not isinstance(args[0], StoredTensor):
        raise ValueError("a parameter that is not made of a tensor")
    return args[0]


def _ordered_dict(args: tuple[object, ...]) -> dict[object, object]:
    """OrderedDict() or, as Python 2 wrote it, OrderedDict([[key, value], ...])."""
    pairs = args[0] if len(args) == 1 else []
    if (
        len(args) > 1
        or not isinstance(pairs, list)
        or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs)
    ):
        raise ValueError("an OrderedDict that is not made of pairs")
    return {plain_key(key): value for key, value in pairs}


def plain_key(key: object) -> object:
    """A dict's key as it is where it can name something: text, or a small number. Others become keys that equal none:
    a deep tuple's hash never ends, and numbers can be chosen that all have the same hash."""
    return key if type(key) is str or (type(key) is int and 0 <= key < 1 << 31) else Ignored()


def _size(args: tuple[object, ...]) -> tuple[int, ...]:
    if len(args) != 1 or not _are_counts(args[0]):
        raise ValueError("a torch.Size that is not made of sizes")
    return args[0]


def _are_counts(value: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and len(value) <= 2 * _MOST_DIMS and all(_is_count(one) for one in value)


def _is_count(value: object) -> TypeGuard[int]:
    """A whole number from 0 up; True is none."""
    return type(value) is int and 0 <= value <= _LARGEST


def _named(value: object) -> str:
    return value.name if isinstance(value, Global) else f"a {type(value).__name__}"


def _ignored(_args: tuple[object, ...]) -> Ignored:
    return Ignored()


_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_REBUILDS: Mapping[str, Callable[[tuple[object, ...]], object]] = MappingProxyType({
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
})  # fmt: skip
_CALLS: Mapping[str, Callable[[tuple[object, ...]], object]] = MappingProxyType({
    **_REBUILDS,
    "collections.OrderedDict": _ordered_dict,
    "torch.Size": _size,
    "torch.device": _ignored,
    "_codecs.encode": _ignored,
    "builtins.set": _ignored,
    "builtins.frozenset": _ignored,
    "builtins.bytearray": _ignored,
    "builtins.complex": _ignored,
})  # fmt: skip
_STORAGES: Mapping[str, DType | None] = MappingProxyType({
    "torch.DoubleStorage": DType.F64, "torch.FloatStorage": DType.F32, "torch.HalfStorage": DType.F16,
    "torch.BFloat16Storage": DType.BF16, "torch.LongStorage": DType.I64, "torch.IntStorage": DType.I32,
    "torch.ShortStorage": DType.I16, "torch.CharStorage": DType.I8, "torch.ByteStorage": DType.U8,
    "torch.BoolStorage": DType.BOOL, "torch.ComplexFloatStorage": DType.C64,
    "torch.UntypedStorage": None, "torch.storage.UntypedStorage": None,
})  # fmt: skip
_DTYPES: Mapping[str, DType] = MappingProxyType({
    f"torch.{dtype.torch_name}": dtype for dtype in DType if dtype.in_files
})  # fmt: skip
_TENSOR_TYPES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
_UNSUPPORTED: Mapping[str, str] = MappingProxyType({
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor without data",
    "torch._utils._rebuild_wrapper_subclass": "a tensor of its own class",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of another device",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of another device",
    "torch.ComplexDoubleStorage": "a complex128 tensor",
})  # fmt: skip
