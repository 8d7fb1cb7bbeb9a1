"""A strict interpreter of the pickles that torch.save writes: plain values and descriptions of tensors. [no-torch]

Python's own unpickler imports and calls whatever a pickle names. This one knows the few globals of `pt_objects`, looks
none of them up and calls nothing; what it builds is bounded by the pickle's own length. `pickletools.genops` splits the
bytes into opcodes (https://github.com/python/cpython/blob/main/Lib/pickletools.py) and checks every length.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from types import MappingProxyType

from streaming.checkpoint.pt_objects import Ignored, Storage, allow_global, call_global, make_storage, plain_key

PICKLE_LIMIT = 32 << 20  # bytes; that of a model of 100,000 tensors has about 15 MB
_MOST_OPERATIONS = 4_000_000  # two seconds or three; a tensor takes about 30
_DEEPEST_STACK = 200_000  # values; a dict is filled a thousand entries at a time
_DEEPEST_GROUPS = 1000
_LARGEST_BITS = 128  # torch's magic number has 80


def read_pickle(stream: BytesIO, storages: dict[str, Storage] | None = None) -> object:
    """The value of the pickle that begins where the stream stands; the stream is left behind it.

    `storages` is filled with every storage that the pickle refers to, by key.

    dicts, lists, tuples and plain values are Python's own, tensors are StoredTensor, other things Ignored. Raises
    ValueError, in words, for whatever is cut short, malformed, too large or refused.
    """
    machine = _Machine({} if storages is None else storages)
    for count, (name, arg) in enumerate(_operations(stream)):
        if name == "STOP":
            return machine.result()
        if count >= _MOST_OPERATIONS:
            raise ValueError(f"its pickle has more than {_MOST_OPERATIONS} operations")
        machine.run(name, arg)
    raise ValueError("its pickle has no end")


def _operations(stream: BytesIO) -> Iterator[tuple[str, object]]:
    try:
        yield from ((opcode.name, arg) for opcode, arg, _ in pickletools.genops(stream))
    except ValueError as error:
        raise ValueError(f"its pickle is broken: {error}") from error


class _Machine:
    """The unpickler's stack, its marks (stacks that wait below the current one), and its memo."""

    def __init__(self, storages: dict[str, Storage]) -> None:
        self.storages = storages
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def run(self, name: str, arg: object) -> None:
        if name in _VALUES:
            self.push(_checked(arg))
        elif (handler := _HANDLERS.get(name)) is not None:
            handler(self, arg)
        elif name not in _SKIPPED:
            raise ValueError(f"its pickle uses the operation {name}, which is refused")

    def push(self, value: object) -> None:
        self.stack.append(value)
        if len(self.stack) > _DEEPEST_STACK:
            raise ValueError(f"its pickle stacks more than {_DEEPEST_STACK} values")

    def pop(self) -> object:
        if not self.stack:
            raise ValueError("its pickle takes a value from an empty stack")
        return self.stack.pop()

    def top(self) -> object:
        if not self.stack:
            raise ValueError("its pickle needs a value on an empty stack")
        return self.stack[-1]

    def result(self) -> object:
        if self.marks or len(self.stack) != 1:
            raise ValueError("its pickle ends with values left over")
        return self.stack[0]

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []
        if len(self.marks) > _DEEPEST_GROUPS:
            raise ValueError(f"its pickle is nested more than {_DEEPEST_GROUPS} deep")

    def pop_mark(self) -> list[object]:
        if not self.marks:
            raise ValueError("its pickle closes a group that was never opened")
        values, self.stack = self.stack, self.marks.pop()
        return values


def _checked(value: object) -> object:
    if isinstance(value, int) and value.bit_length() > _LARGEST_BITS:
        raise ValueError(f"its pickle holds a number of {value.bit_length()} bits")
    return value


def _pairs(values: list[object]) -> dict[object, object]:
    if len(values) % 2:
        raise ValueError("its pickle fills a dict with a key that has no value")
    return {plain_key(key): value for key, value in zip(values[::2], values[1::2], strict=True)}


def _fill(target: object, values: list[object]) -> None:
    """Pairs into a dict. Items given to something that is left out are left out too."""
    if isinstance(target, dict):
        target.update(_pairs(values))
    elif not isinstance(target, Ignored):
        raise ValueError(f"its pickle sets items of a {type(target).__name__}")


def _extend(target: object, values: list[object]) -> None:
    if isinstance(target, list):
        target.extend(values)
    elif not isinstance(target, Ignored):
        raise ValueError(f"its pickle appends to a {type(target).__name__}")


def _set_item(machine: _Machine, _arg: object) -> None:
    value, key = machine.pop(), machine.pop()
    _fill(machine.top(), [key, value])


def _set_items(machine: _Machine, _arg: object) -> None:
    values = machine.pop_mark()
    _fill(machine.top(), values)


def _append(machine: _Machine, _arg: object) -> None:
    value = machine.pop()
    _extend(machine.top(), [value])


def _appends(machine: _Machine, _arg: object) -> None:
    values = machine.pop_mark()
    _extend(machine.top(), values)


def _add_items(machine: _Machine, _arg: object) -> None:
    machine.pop_mark()
    if not isinstance(machine.top(), Ignored):
        raise ValueError(f"its pickle adds items to a {type(machine.top()).__name__}")


def _frozen_set(machine: _Machine, _arg: object) -> None:
    machine.pop_mark()
    machine.push(Ignored())


def _tuple_of(count: int) -> Callable[[_Machine, object], None]:
    def run(machine: _Machine, _arg: object) -> None:
        values = [machine.pop() for _ in range(count)]
        machine.push(tuple(reversed(values)))

    return run


def _put(machine: _Machine, arg: object) -> None:
    assert isinstance(arg, int)  # as genops reads it
    machine.memo[arg] = machine.top()


def _get(machine: _Machine, arg: object) -> None:
    assert isinstance(arg, int)
    if arg not in machine.memo:
        raise ValueError(f"its pickle refers to value {arg}, which it has not stored")
    machine.push(machine.memo[arg])


def _global(machine: _Machine, arg: object) -> None:
    module, _, name = str(arg).partition(" ")
    machine.push(allow_global(module, name))


def _stack_global(machine: _Machine, _arg: object) -> None:
    name, module = machine.pop(), machine.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise ValueError("its pickle names a global by something that is no text")
    machine.push(allow_global(module, name))


def _reduce(machine: _Machine, _arg: object) -> None:
    args, function = machine.pop(), machine.pop()
    machine.push(call_global(function, args))


def _build(machine: _Machine, _arg: object) -> None:
    """Attributes of a dict or a tensor (a state dict's `_metadata`): left out."""
    machine.pop()
    machine.top()


def _persistent(machine: _Machine, _arg: object) -> None:
    storage = make_storage(machine.pop())
    if machine.storages.setdefault(storage.key, storage) != storage:
        raise ValueError(f"storage {storage.key[:40]!r} is given two types or two sizes")
    machine.push(storage)


_VALUES = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
})  # fmt: skip
_SKIPPED = frozenset({"PROTO", "FRAME"})
_HANDLERS: Mapping[str, Callable[[_Machine, object], object]] = MappingProxyType({
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "MARK": lambda machine, _: machine.mark(),
    "POP": lambda machine, _: machine.pop() if machine.stack else machine.pop_mark(),
    "POP_MARK": lambda machine, _: machine.pop_mark(),
    "DUP": lambda machine, _: machine.push(machine.top()),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "EMPTY_SET": lambda machine, _: machine.push(Ignored()),
    "LIST": lambda machine, _: machine.push(machine.pop_mark()),
    "DICT": lambda machine, _: machine.push(_pairs(machine.pop_mark())),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.pop_mark())),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "FROZENSET": _frozen_set,
    "APPEND": _append,
    "APPENDS": _appends,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "ADDITEMS": _add_items,
    "PUT": _put,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": lambda machine, _: _put(machine, len(machine.memo)),
    "GET": _get,
    "BINGET": _get,
    "LONG_BINGET": _get,
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "BUILD": _build,
    "BINPERSID": _persistent,
})  # fmt: skip
