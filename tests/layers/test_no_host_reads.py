"""Within the decoder's layers no number is read by the host: on a GPU each such read would stop the queue of kernels.

Run on the meta device, which has shapes and no numbers: whatever asks for one raises. Its kernels are those of any
device that is not a CPU.
"""

from __future__ import annotations

import pytest
import torch

from examples.write_tiny_model import ARCHITECTURES, TinyModel, config_of
from layers.architecture import layer_specs
from layers.batch import make_batch
from layers.config import parse_config
from layers.context import StepContext
from layers.decoder import build_shell
from layers.kv_cache import KVCache
from quant.dtypes import DType
from quant.kernels import Kernels
from quant.policy import default_policy
from quant.registry import scheme_by_name, scheme_names


@pytest.mark.parametrize("scheme", scheme_names())
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_prefill_and_a_decode_step_run_without_numbers(family: str, scheme: str) -> None:
    config = parse_config(config_of(TinyModel(family=family, layers=2)))
    policy = default_policy(scheme_by_name(scheme), quantize_head=scheme != "none")
    model = build_shell(config, layer_specs(config, dtype=DType.BF16, policy=policy, tied=False))
    context = StepContext(kernels=Kernels.detect())
    cache = KVCache(config, max_tokens=8, dtype=DType.BF16, device="meta")
    with torch.inference_mode():
        for tokens in ([1, 2, 3], [4]):
            batch = make_batch([(tokens, cache)], vocab_size=config.vocab_size, device="meta")
            hidden, rope = model.embed(batch.token_ids, context), model.rope(batch)
            for layer in model.layers:
                hidden = layer(hidden, batch, rope, context)
            batch.advance()
            assert hidden.shape == (len(tokens), config.hidden_size)
            assert model.head(hidden, context).shape == (len(tokens), config.vocab_size)


def test_a_number_that_is_read_would_be_found() -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        torch.empty(1, device="meta").item()
