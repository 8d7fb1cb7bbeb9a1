"""The choice of a strategy as a table, and what eager reads: pure functions of file system, sizes and memory."""

from __future__ import annotations

import pytest

from streaming.errors import OptionError
from streaming.read_strategy import Surroundings, choose_strategy, whole_file_bytes
from streaming.whole_files import file_visits

GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "nbytes", "available", "strategy", "words"),
    [
        ("ext4", 100 * GIB, 8 * GIB, "direct", "local files (ext4)"),
        ("xfs", 1 * GIB, None, "direct", "local files (xfs)"),
        (None, 1 * GIB, 8 * GIB, "direct", "local files (an unknown file system)"),
        ("nfs", 9 * GIB, 10 * GIB, "prefetch", "9.0 GiB fit into 90 % of 10.0 GiB of available memory"),
        ("nfs", 9 * GIB + 1, 10 * GIB, "direct", "but 9.0 GiB are more than 90 % of 10.0 GiB"),
        ("nfs4", 1 * GIB, 8 * GIB, "prefetch", "network file system (nfs4)"),
        ("lustre", 1 * GIB, 8 * GIB, "prefetch", "network file system (lustre)"),
        ("cifs", 1 * GIB, 8 * GIB, "prefetch", "network file system (cifs)"),
        ("fuse.sshfs", 1 * GIB, 8 * GIB, "prefetch", "network file system (fuse.sshfs)"),
        ("fuse.ext2", 1 * GIB, 8 * GIB, "direct", "local files (fuse.ext2)"),
        ("lustre", 100 * GIB, 8 * GIB, "direct", "but 100.0 GiB are more than"),
        ("nfs", 1 * GIB, None, "direct", "the available memory is unknown"),
    ],
)
def test_the_choice_follows_file_system_size_and_memory(
    kind: str | None, nbytes: int, available: int | None, strategy: str, words: str
) -> None:
    choice = choose_strategy(None, Surroundings(kind, nbytes, available))
    assert choice.strategy == strategy
    assert words in choice.reason


def test_what_was_asked_for_is_taken_whatever_the_surroundings() -> None:
    choice = choose_strategy("eager", Surroundings("nfs", 1, 100, torchao=True))
    assert (choice.strategy, choice.reason) == ("eager", "--safetensors-load-strategy eager")


def test_a_torchao_checkpoint_selects_torchao_by_itself() -> None:
    assert choose_strategy(None, Surroundings("nfs", 1, 100, torchao=True)).strategy == "torchao"


def test_files_whose_pieces_all_have_room_are_visited_once_each() -> None:
    assert file_visits([(0, True), (1, True), (0, True), (2, True), (1, True)]) == [0, 1, 2]


def test_a_piece_that_waits_for_its_turn_behind_another_file_brings_its_file_back() -> None:
    assert file_visits([(0, False), (0, False), (1, False), (0, False), (1, True)]) == [0, 1, 0]


def test_eager_holds_the_largest_file_and_reads_each_visit_whole() -> None:
    assert whole_file_bytes([(0, False), (1, False), (0, False)], [100, 30]) == (230, 100)
    assert whole_file_bytes([], []) == (0, 0)


def test_eager_is_refused_where_files_would_be_read_again_and_again() -> None:
    with pytest.raises(OptionError, match=r"eager: the weights lie scattered over the files, so 1\.0 KiB would be"):
        whole_file_bytes([(number % 2, False) for number in range(10)], [100, 105])
