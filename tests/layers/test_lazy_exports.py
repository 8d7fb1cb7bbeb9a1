"""`import layers` costs no torch, and neither does anything that planning needs from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PLANNING = """
import json, sys
sys.modules["torch"] = None  # importing it raises
import layers
from tests.layers.real_configs import CONFIGS
from quant.dtypes import DType
from quant.wide import Wide

class Policy:
    def scheme_for(self, kind, name):
        return Wide()

config = layers.parse_config(CONFIGS["Qwen2.5-0.5B"])
specs = layers.layer_specs(config, dtype=DType.BF16, policy=Policy())
print(json.dumps({
    "kept": sum(param.nbytes for spec in specs for param in spec.params),
    "target": layers.weight_map(config).locate("model.layers.3.self_attn.k_proj.bias").param,
    "cache": layers.kv_cache_nbytes(config, max_tokens=10, dtype=DType.BF16),
    "greedy": layers.SamplingParams().is_greedy,
    "loaded": sorted(name for name in ("numpy", "anyio") if name in sys.modules),
}))
"""


def test_planning_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLANNING], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "kept": 2 * 494_032_768,
        "target": "model.layers.3.self_attn.qkv_proj.bias",
        "cache": 2 * 24 * 2 * 10 * 64 * 2,
        "greedy": True,
        "loaded": [],
    }


def test_every_public_name_is_there_and_nothing_else_is_promised() -> None:
    import layers

    for name in layers.__all__:
        assert getattr(layers, name).__name__ == name
    assert dir(layers) == sorted(layers.__all__)
