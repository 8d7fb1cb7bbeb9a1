"""A GGUF's key-value metadata: scalars as they are, arrays decoded when they are asked for. [no-torch]

A vocabulary is an array of tens of thousands of strings. Walking over it is needed to find what follows; making Python
strings of it is not, until a tokenizer is built. So an array stays a place in the header's bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

STRING, ARRAY, BOOL = 8, 9, 7
# value type -> struct code (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, `gguf_metadata_value_type`)
SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
)
_TEXT_ERRORS = "surrogateescape"  # some vocabularies hold bytes that are no UTF-8; encoding gives them back unchanged


@dataclass(frozen=True)
class ArraySpan:
    """An array that has been stepped over: `count` items of `item_type` from byte `offset` of the header on."""

    item_type: int
    count: int
    offset: int


class GgufMetadata(Mapping[str, Any]):
    """The metadata by key. An array is decoded anew at each access, into a list: keep it where it is used twice."""

    def __init__(self, values: Mapping[str, Any], header: bytes | bytearray, order: str) -> None:
        self._values = values
        self._header = header
        self._order = order  # struct's sign: "<" or ">"

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, ArraySpan):
            return value
        if value.item_type == STRING:
            return list(self._strings(value))
        items = struct.unpack_from(f"{self._order}{value.count}{SCALARS[value.item_type]}", self._header, value.offset)
        return [bool(item) for item in items] if value.item_type == BOOL else list(items)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _strings(self, span: ArraySpan) -> Iterator[str]:
        length, position = struct.Struct(f"{self._order}Q"), span.offset
        for _ in range(span.count):
            start = position + length.size
            position = start + length.unpack_from(self._header, position)[0]
            yield decode_text(self._header[start:position])


def decode_text(raw: bytes | bytearray) -> str:
    """A GGUF string; bytes that are no UTF-8 become surrogates, which encode back to the same bytes."""
    return raw.decode("utf-8", _TEXT_ERRORS)
