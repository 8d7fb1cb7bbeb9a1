"""What torch does only the first time it is used: set up before a load whose reading hides it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def warm_up() -> None:
    """Run each kind of kernel once on small inputs: thread pools and code generation are then behind us."""
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            x, weight = torch.zeros(8, 256, dtype=dtype), torch.zeros(256, 256, dtype=dtype)
            F.linear(x[:1], weight)
            F.linear(x, weight)
            heads = x.view(1, 4, 8, 64)
            F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
