"""Every family on ranks that are processes of their own: the logits of transformers, and what one rank generates.

T tensor, E expert, P pipeline parallel size. The followers are those of the pool.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from layers.batch import make_batch
from layers.errors import ShardError
from layers.sampling_params import SamplingParams
from streaming import LLM
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.ranks.report import RankReport
from streaming.runner import ModelRunner
from tests.layers.family_cases import FAMILY_CASES
from tests.layers.tiny import some_ids
from tests.streaming.ranks.rank_pool import RankPool
from tests.test_against_transformers import CASES, reference_logits, write_checkpoint

NAMES = ("llama", "llama head_dim", "mistral", "qwen2", "qwen3", *FAMILY_CASES)
SPARSE = tuple(name for name in NAMES if any("experts" in key for key in CASES[name][1]))
PROMPTS = (tuple(some_ids(19, seed=19)), tuple(some_ids(7, seed=7)))
EIGHT_HEADS = (("num_attention_heads", 8),)
EIGHT_OF_BOTH = (*EIGHT_HEADS, ("num_key_value_heads", 8))
ALL_HEADS = ("gpt2", "phi", "olmo2 bias, tied", "deepseek_v2", "deepseek_v3")  # no key heads that several heads share
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4}

ODD_SIZES = {"qwen3_moe plain scores": 20}  # that eight ranks do not divide

Mesh = tuple[int, int, int]  # T, E, P
QUICK: list[tuple[str, Mesh]] = [
    ("llama", (4, 1, 1)),
    ("gpt2", (2, 1, 1)),
    ("gpt_oss", (2, 4, 1)),
    ("deepseek_v3", (4, 4, 1)),
    ("mixtral", (1, 4, 1)),
    ("qwen3_moe", (1, 2, 2)),
]
DENSE_MESHES: list[Mesh] = [(2, 1, 1), (4, 1, 1), (1, 1, 2), (2, 1, 2)]
SPARSE_MESHES: list[Mesh] = [(1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 4, 1), (4, 4, 1), (2, 2, 2)]
REST = [
    *((name, mesh) for name in NAMES for mesh in DENSE_MESHES if (name, mesh) not in QUICK),
    *((name, mesh) for name in SPARSE for mesh in SPARSE_MESHES if (name, mesh) not in QUICK),
]


@dataclass(frozen=True)
class Written:
    """A checkpoint, and what is expected of it."""

    folder: Path
    logits: tuple[torch.Tensor, ...]  # of each prompt, every position
    decoded: tuple[torch.Tensor, ...]  # of each prompt, behind one token more
    tokens: list[tuple[int, ...]]  # what one rank generates


Write = Callable[..., Written]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """(a case's name, changes to it) -> the checkpoint, written once."""
    root, transformers = tmp_path_factory.mktemp("families"), _transformers()

    @cache
    def write(name: str, *changes: tuple[str, int]) -> Written:
        model_type, own = CASES[name]
        folder = root / "_".join([name.replace(" ", "_"), *(f"{key}{value}" for key, value in changes)])
        reference = write_checkpoint(transformers, model_type, {**own, **dict(changes)}, folder=folder)
        logits = tuple(reference_logits(reference, prompt) for prompt in PROMPTS)
        longer = [[*prompt, int(found[-1].argmax())] for prompt, found in zip(PROMPTS, logits, strict=True)]
        decoded = tuple(reference_logits(reference, prompt)[-1:] for prompt in longer)
        with LLM(folder, dtype="float32", reader="threads") as llm:
            torch.testing.assert_close(llm.logits(PROMPTS[0]), logits[0], **CLOSE)
            tokens = _answers(llm)
        return Written(folder, logits, decoded, tokens)

    write("llama")  # here, where a test's limit of time does not count for all that is imported
    return write


def _transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = import_module("transformers")
    package.logging.set_verbosity_error()
    return package


def _answers(llm: LLM) -> list[tuple[int, ...]]:
    return [done.token_ids for done in llm.complete(PROMPTS, GREEDY)]


def check(made: Written, mesh: Mesh, **options: Any) -> dict[int, RankReport]:
    """What the ranks compute and read; every rank's report."""
    keywords = given(mesh) | {"dtype": "float32"} | options
    with LLM(made.folder, **keywords) as llm:
        torch.testing.assert_close(llm.logits(PROMPTS[0]), made.logits[0], **CLOSE)
        first, second = llm.call(partial(batch_and_step, llm))
        torch.testing.assert_close(first, torch.cat(made.logits), **CLOSE)
        torch.testing.assert_close(second, torch.cat(made.decoded), **CLOSE)
        assert _answers(llm) == made.tokens
        llm.wait_loaded()
        reports = {0: llm._model.report(), **llm._model.rank_reports()}
    plans = [
        prepare(str(made.folder), LoadOptions(**keywords), rank=rank).plan for rank in range(mesh[2] * max(mesh[:2]))
    ]
    assert {rank: report.bytes_read for rank, report in reports.items()} == {
        rank: plan.read_nbytes for rank, plan in enumerate(plans)
    }
    return reports


def batch_and_step(llm: LLM, runner: ModelRunner, stop: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of both prompts in one batch, all rows; then those of the most likely next token of each."""
    model, vocab_size = llm._model, runner.model.config.vocab_size
    caches = [model.new_cache(len(prompt) + 1) for prompt in PROMPTS]
    batch = make_batch(list(zip(PROMPTS, caches, strict=True)), vocab_size=vocab_size)
    first = runner.forward(batch, range(sum(map(len, PROMPTS))), stop=stop)
    tokens = first[list(batch.last_rows)].argmax(-1).tolist()
    step = make_batch([([token], kv) for token, kv in zip(tokens, caches, strict=True)], vocab_size=vocab_size)
    return first, runner.forward(step, step.last_rows, stop=stop)


def given(mesh: Mesh) -> dict[str, Any]:
    """The keywords of LLM."""
    tensor, expert, pipeline = mesh
    return {"tensor_parallel_size": tensor, "expert_parallel_size": expert, "pipeline_parallel_size": pipeline}


def named(case: tuple[str, Mesh]) -> str:
    name, (tensor, expert, pipeline) = case
    return f"{name}-{tensor}x{expert}x{pipeline}"


@pytest.mark.parametrize(("name", "mesh"), QUICK, ids=map(named, QUICK))
def test_the_logits_of_a_family_on_ranks_are_those_of_transformers(
    name: str, mesh: Mesh, written: Write, pooled: RankPool
) -> None:
    check(written(name), mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), REST, ids=map(named, REST))
def test_the_logits_of_every_family_on_every_mesh_are_those_of_transformers(
    name: str, mesh: Mesh, written: Write, pooled: RankPool
) -> None:
    check(written(name), mesh)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((1, 2, 1), {"expert_map": [[4, 0, 1], [1, 2, 3, 0]]}),
        ((2, 2, 1), {"moe_load": "routed_first"}),
        pytest.param((1, 2, 2), {"expert_placement": "round_robin"}, marks=pytest.mark.slow),
        pytest.param(
            (2, 4, 1), {"moe_load": "routed_first", "expert_placement": "round_robin"}, marks=pytest.mark.slow
        ),
        pytest.param((2, 1, 1), {"read_sharing": "shared"}, marks=pytest.mark.slow),
        pytest.param((4, 1, 1), {"read_sharing": "shared"}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), {"safetensors_load_strategy": "lazy"}, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), {"safetensors_load_strategy": "eager"}, marks=pytest.mark.slow),
    ],
)
def test_wherever_experts_are_and_however_they_come_the_logits_are_the_same(
    mesh: Mesh, options: dict[str, Any], written: Write, pooled: RankPool
) -> None:
    check(written("mixtral"), mesh, **options)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_eight_ranks_compute_eight_heads(name: str, written: Write, pooled: RankPool) -> None:
    model_type = CASES[name][0]
    changes = EIGHT_OF_BOTH if name in ALL_HEADS or model_type.startswith("deepseek") else EIGHT_HEADS
    if name in ODD_SIZES:
        with pytest.raises(ShardError, match=f"its {ODD_SIZES[name]} .* tensor parallel size 8"):
            prepare(str(written(name, *changes).folder), LoadOptions(tensor_parallel_size=8))
        return
    check(written(name, *changes), (8, 1, 1))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (3, "tensor parallel size 3 does not divide the model's 4 attention heads"),
        (8, "tensor parallel size 8 does not divide the model's 4 attention heads"),
    ],
)
def test_heads_that_cannot_be_shared_out_are_refused_with_both_numbers(tensor: int, words: str, written: Write) -> None:
    with pytest.raises(ShardError, match=words):
        LLM(written("llama").folder, tensor_parallel_size=tensor)


def test_each_of_eight_ranks_reads_an_eighth_of_128_experts(written: Write, pooled: RankPool) -> None:
    made = written("qwen3_moe", ("num_experts", 128))
    with safe_open(made.folder / "model.safetensors", framework="np") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    experts = sum(nbytes for name, nbytes in sizes.items() if ".experts." in name)
    shared = sum(sizes.values()) - experts
    assert experts > 4 * shared
    reports = check(made, (1, 8, 1))
    assert [report.bytes_read for report in reports.values()] == [experts // 8 + shared] * 8
