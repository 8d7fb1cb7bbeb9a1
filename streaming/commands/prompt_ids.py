"""Prompts for measurements: ids drawn from a fixed seed, the same for every program that is measured."""

from __future__ import annotations


def seeded_ids(count: int, vocab_size: int) -> list[int]:
    """`count` ids from a linear congruential generator (ANSI C's constants), away from the first, special ids."""
    state, ids = 12345, []
    for _ in range(count):
        state = (1103515245 * state + 12345) % (1 << 31)
        ids.append(min(3, vocab_size - 1) + state % max(1, min(vocab_size, 30000) - 3))
    return ids
