"""A model on several ranks computes what it computes on one, whatever the mesh.

The weights are made up (load format dummy), so every family costs a config.json.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.layers.family_cases import FAMILY_CASES
from tests.layers.tiny import raw_config
from tests.streaming.ranks.threaded import open_ranked

PROMPTS = ((1, 2, 3, 4, 5), (7, 8, 9), (11,))
MESHES: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "ep2": {"expert_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2 ep4": {"tensor_parallel_size": 2, "expert_parallel_size": 4},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "ep2 pp2": {"expert_parallel_size": 2, "pipeline_parallel_size": 2},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 3}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "mixtral": FAMILY_CASES["mixtral"],
    "deepseek_v3": FAMILY_CASES["deepseek_v3"],
}
CASES = [
    *(("llama", mesh) for mesh in ("tp2", "tp2 pp2")),
    ("tied", "pp2"),
    *(("mixtral", mesh) for mesh in ("tp2 ep4", "ep2 pp2")),
]


def write_config(folder: Path, name: str) -> Path:
    """A folder with the configuration of a model and no weights."""
    model_type, changes = MODELS[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw_config(model_type, **changes)))
    return folder


@cache
def alone(folder: Path) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Logits and answers of one rank."""
    with open_ranked(folder, load_format="dummy") as one:
        return one.logits(PROMPTS[0]), one.complete(PROMPTS)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each model."""
    root = tmp_path_factory.mktemp("configs")
    return {name: write_config(root / name, name) for name in MODELS}


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_logits_and_answers_are_those_of_one_rank(configs: dict[str, Path], model: str, mesh: str) -> None:
    logits, answers = alone(configs[model])
    assert logits.std() > 0.01
    with open_ranked(configs[model], load_format="dummy", **MESHES[mesh]) as ranked:
        torch.testing.assert_close(ranked.logits(PROMPTS[0]), logits, rtol=0, atol=1e-4)
        assert ranked.complete(PROMPTS) == answers
        ranked.model.wait_loaded(20)
        assert ranked.complete(PROMPTS) == answers  # with the embedding table, and the caches of before given up
