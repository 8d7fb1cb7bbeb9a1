"""The stored form of a model's weights, kept on disk from the first pass on: nothing is quantized twice. [no-torch]

with closing(open_stored_cache(folder, cache_key(prepared), limit_nbytes=..., warn=...)) as cache:
    if not cache.load("layers.3.qkv_proj", tensors):
        ...  # make them
        cache.put("layers.3.qkv_proj", tensors)
"""

from __future__ import annotations

from streaming.stored_cache.cache import StoredCache, open_stored_cache
from streaming.stored_cache.journal import CachedTensor
from streaming.stored_cache.key import cache_key
from streaming.stored_cache.place import default_cache_folder, default_limit_nbytes

__all__ = [
    "CachedTensor",
    "StoredCache",
    "cache_key",
    "default_cache_folder",
    "default_limit_nbytes",
    "open_stored_cache",
]
