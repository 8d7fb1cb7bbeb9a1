"""What a checkpoint's files hold, by file and by dtype: for any model, its family known or not. [no-torch]"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streaming.checkpoint.tensors import Checkpoint, TensorInfo


@dataclass(frozen=True)
class Amount:
    """So many tensors of so many bytes together."""

    tensors: int
    nbytes: int


@dataclass(frozen=True)
class Account:
    """A checkpoint's tensors added up; files in the checkpoint's order, forms (a dtype or a block format) by bytes."""

    total: Amount
    by_form: dict[str, Amount]
    by_file: dict[str, dict[str, Amount]]  # file -> form -> amount; files that hold no tensor are there, empty


def make_account(checkpoint: Checkpoint) -> Account:
    """Add up what the headers say."""
    sums: dict[tuple[object, str], list[int]] = {}
    for info in checkpoint.tensors.values():
        found = sums.setdefault((info.file, _form(info)), [0, 0])
        found[0] += 1
        found[1] += info.nbytes
    by_file: dict[str, dict[str, Amount]] = {str(file): {} for file in checkpoint.files}
    for (file, form), (tensors, nbytes) in sums.items():
        by_file.setdefault(str(file), {})[form] = Amount(tensors, nbytes)
    forms = {form for _, form in sums}
    by_form = {form: add_up(found[form] for found in by_file.values() if form in found) for form in forms}
    ordered = sorted(by_form.items(), key=lambda pair: (-pair[1].nbytes, pair[0]))
    return Account(add_up(by_form.values()), dict(ordered), by_file)


def add_up(amounts: Iterable[Amount]) -> Amount:
    """All of them together."""
    found = list(amounts)
    return Amount(sum(amount.tensors for amount in found), sum(amount.nbytes for amount in found))


def _form(info: TensorInfo) -> str:
    return info.encoding.name if info.encoding is not None else info.dtype.value
