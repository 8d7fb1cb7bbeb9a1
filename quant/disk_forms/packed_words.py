"""Codes of 2, 3, 4 or 8 bits, packed in 32-bit words, become the bytes that quant.int4 keeps: a code a byte with 8
bits, else two, the even column in the low nibble.

Words hold their codes lowest bits first; codes of 3 bits run on across words, 32 of them in three. Four kept bytes are
a *unit*, one int32: with 4 and 8 bits a word is a unit already, and all there is to do is to turn the matrix. Whole
words are shifted and masked, never single codes, a tile at a time: what is held beside the two forms is some MiB
whatever the tensor's size.

O outputs (kept rows), I inputs, W words, U units, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's: the j-th nibble of a word belongs to output 8c + ORDER[j]."""

_COLUMNS = 512  # of words in a tile: with its temporaries it stays in a cache of a MiB or two
_ROWS = 192  # a multiple of 3 and of 8: words that belong together stay together


def keep_columns(words: torch.Tensor, out: torch.Tensor, *, bits: int) -> None:
    """int32 [W, O], each column the codes of one output, into kept uint8 [O, ceil(I/2)] (8 bits: [O, I])."""
    for rows, columns in _tiles(words):
        tile = _columns_as_bytes(_units(words[rows, columns].contiguous(), bits=bits))
        first = 4 * (rows.start * 4 // min(bits, 4))
        stop = min(out.shape[1], first + tile.shape[1])
        out[columns, first:stop].copy_(tile[:, : stop - first])


def keep_interleaved(words: torch.Tensor, out: torch.Tensor) -> None:
    """AWQ's int32 [I, O/8], codes of 8 outputs in each word, into kept uint8 [O, ceil(I/2)]."""
    outputs = out.unflatten(0, (-1, len(ORDER)))
    for rows, columns in _tiles(words):
        units = _turn_nibbles(words[rows, columns])  # [U, 8, columns]
        first = rows.start // 2
        stop = min(out.shape[1], first + 4 * units.shape[0])
        for nibble, output in enumerate(ORDER):
            tile = _columns_as_bytes(units[:, nibble])
            outputs[columns, output, first:stop].copy_(tile[:, : stop - first])


def codes_of_words(words: torch.Tensor, count: int, *, bits: int) -> torch.Tensor:
    """Codes uint8 [R, count] of int32 [R, W], packed along the rows: of small tensors, such as zero points."""
    kept = _columns_as_bytes(_units(words.t().contiguous(), bits=bits))
    codes: torch.Tensor = kept if bits == 8 else torch.stack((kept & 15, kept >> 4), -1).flatten(1)
    return codes[:, :count]


def in_output_order(codes: torch.Tensor) -> torch.Tensor:
    """Codes [G, O] in the order in which AWQ's words hold them, put into that of the outputs."""
    grouped = codes.unflatten(1, (-1, len(ORDER)))
    ordered: torch.Tensor = grouped[:, :, sorted(range(len(ORDER)), key=ORDER.__getitem__)]
    return ordered.flatten(1)


def _tiles(words: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    for row in range(0, words.shape[0], _ROWS):
        for column in range(0, words.shape[1], _COLUMNS):
            yield slice(row, row + _ROWS), slice(column, column + _COLUMNS)


def _columns_as_bytes(units: torch.Tensor) -> torch.Tensor:
    """[U, O] -> uint8 [O, 4U]."""
    turned = torch.empty(units.shape[::-1], dtype=units.dtype, device=units.device)
    return turned.copy_(units.t()).view(torch.uint8)


def _turn_nibbles(words: torch.Tensor) -> torch.Tensor:
    """[I, C] -> units [I/8, 8, C]: nibble j of eight words below each other become unit j. Words that are lacking to
    the last eight are zeros."""
    if lacking := -words.shape[0] % 8:
        words = torch.cat((words, words.new_zeros(lacking, words.shape[1])))
    units: torch.Tensor = words.unflatten(0, (-1, 8)).clone()
    halves = units.unflatten(1, (2, 2, 2))
    for axis, distance, mask in ((3, 4, 0x0F0F0F0F), (2, 8, 0x00FF00FF), (1, 16, 0x0000FFFF)):
        upper, lower = halves.unbind(axis)
        swapped = (upper >> distance).bitwise_xor_(lower).bitwise_and_(mask)
        lower.bitwise_xor_(swapped)
        upper.bitwise_xor_(swapped.bitwise_left_shift_(distance))
    return units


# --- codes of less than 4 bits are given 4


def _units(words: torch.Tensor, *, bits: int) -> torch.Tensor:
    """int32 [W, O] -> [U, O]."""
    if bits == 2:
        halves = torch.stack((words & 0xFFFF, (words >> 16).bitwise_and_(0xFFFF)), 1)
        for distance, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333)):
            halves.bitwise_or_(halves << distance).bitwise_and_(mask)
        return halves.flatten(0, 1)
    if bits == 3:
        eights = _eights_of_threes(words)
        for distance, mask in ((4, 0xFFF000), (2, 0x0FC00FC0), (1, 0x38383838)):
            moved = eights & mask
            eights.bitwise_xor_(moved).bitwise_or_(moved.bitwise_left_shift_(distance))
        return eights.flatten(0, 1)
    return words


def _eights_of_threes(words: torch.Tensor) -> torch.Tensor:
    """[W, O] -> [W/3, 4, O]: the 24 bits of eight codes each. Words that are lacking to the last three are zeros."""
    if lacking := -words.shape[0] % 3:
        words = torch.cat((words, words.new_zeros(lacking, words.shape[1])))
    first, second, third = words.unflatten(0, (-1, 3)).unbind(1)
    eights = (
        first & 0xFFFFFF,
        (first >> 24) & 0xFF | (second & 0xFFFF) << 8,
        (second >> 16) & 0xFFFF | (third & 0xFF) << 16,
        (third >> 8) & 0xFFFFFF,
    )
    return torch.stack(eights, 1)
