"""The KV cache and the batch: what is written where, how much memory it is, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from layers.batch import BatchSequence, make_batch
from layers.kv_cache import KVCache, kv_cache_nbytes
from quant.dtypes import DType
from tests.layers.tiny import config_of, new_cache


def test_its_bytes_are_known_beforehand() -> None:
    config = config_of("qwen3", head_dim=16)
    # keys and values, 2 layers, 2 heads, 33 tokens, 16 numbers of 2 bytes
    assert kv_cache_nbytes(config, max_tokens=33, dtype=DType.BF16) == 2 * 2 * 2 * 33 * 16 * 2
    assert KVCache(config, max_tokens=33, dtype=DType.BF16).nbytes == 2 * 2 * 2 * 33 * 16 * 2


def test_each_layer_gives_back_all_that_was_appended_to_it() -> None:
    cache = new_cache(config_of(), max_tokens=5)
    parts = [torch.randn(2, 2, 2, count, 12) for count in (3, 2)]  # [layer, key or value, head, token, number]
    for part in parts:
        for layer in range(2):
            cache.append(layer, part[layer, 0], part[layer, 1])
        cache.advance(part.shape[3])
    assert cache.length == 5
    ((heads, keys, values),) = cache.runs(1, stop=5)
    assert heads == slice(0, 2)
    whole = torch.cat(parts, dim=3)
    assert torch.equal(keys, whole[1, 0])
    assert torch.equal(values, whole[1, 1])
    cache.truncate(4)
    cache.append(0, parts[0][0, 0][:, :1], parts[0][0, 1][:, :1])
    ((_, keys, _),) = cache.runs(0, stop=5)
    assert torch.equal(keys, torch.cat((whole[0, 0][:, :4], parts[0][0, 0][:, :1]), dim=1))


def test_a_cache_that_is_full_says_so() -> None:
    cache = new_cache(config_of(), max_tokens=4)
    cache.advance(3)
    two = torch.zeros(2, 2, 12)
    with pytest.raises(ValueError, match="holds 4 tokens; 3 are filled and 2 more were given"):
        cache.append(0, two, two)
    with pytest.raises(ValueError, match="holds 4 tokens; 3 are filled and 2 more were given"):
        cache.advance(2)
    with pytest.raises(ValueError, match="cannot be cut to 4 tokens: 3 are filled"):
        cache.truncate(4)


def test_a_batch_puts_sequences_one_behind_the_other_at_their_own_positions() -> None:
    first, second = new_cache(config_of(), max_tokens=9), new_cache(config_of(), max_tokens=9)
    second.advance(6)
    batch = make_batch([([5, 6, 7], first), ([8, 9], second)], vocab_size=10)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 6, 7]
    assert batch.sequences == (BatchSequence(0, 3, first), BatchSequence(3, 5, second))
    assert [sequence.length for sequence in batch.sequences] == [3, 8]
    assert batch.last_rows == (2, 4)
    batch.advance()
    assert (first.length, second.length) == (3, 8)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([3, 101], r"token id 101 is outside the vocabulary of 101 \(0 to 100\)"),
        ([-1], "token id -1 is outside"),
        ([], "no new tokens"),
        ([1] * 4, "4 new tokens after 2 do not fit into a KV cache of 5 tokens"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_runs(tokens: list[int], words: str) -> None:
    cache = new_cache(config_of(), max_tokens=5)
    cache.advance(2)
    with pytest.raises(ValueError, match=words):
        make_batch([([1], new_cache(config_of(), max_tokens=1)), (tokens, cache)], vocab_size=101)
