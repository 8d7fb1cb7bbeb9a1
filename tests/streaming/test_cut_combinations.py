"""Models in every form on disk, cut over ranks in every way: each rank keeps its part of what one rank keeps, to the
bit, reads as many bytes as its plan says, and nothing is on no rank."""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_deepseek_index import tensor_table, write_index
from examples.write_tiny_model import TinyModel, write_tiny_model
from layers.config import parse_config
from layers.errors import ShardError
from quant.registry import scheme_names
from streaming import cli
from streaming.options import LoadOptions
from streaming.plan import make_plan
from streaming.prepare import Prepared, prepare
from tests.layers.family_cases import FAMILY_CASES
from tests.layers.tiny import raw_config
from tests.quant.compressed import config as compressed_config
from tests.streaming import test_bitsandbytes_on_disk as bitsandbytes
from tests.streaming import test_compressed_tensors as compressed
from tests.streaming import test_deepseek as deepseek
from tests.streaming import test_every_combination as formats
from tests.streaming import test_gguf_types as gguf_types
from tests.streaming import test_gptq_and_awq as word_packed
from tests.streaming import test_modelopt_on_disk as modelopt
from tests.streaming import test_mxfp4_on_disk as gpt_oss_coded
from tests.streaming.coded import write_coded
from tests.streaming.cut_loading import check_parts
from tests.streaming.test_fp8_on_disk import FP8, in_blocks
from tests.streaming.test_pickle_models import views
from tests.test_against_transformers import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
SCHEMES = (*scheme_names(), "int4_per_group:64:asym")
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
LATENT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
SIZES = {"vocab_size": 200, "intermediate_size": 88}  # parts of 44, 22 and 11: no multiples of any block
ODD = TinyModel(
    layers=2, heads=8, kv_heads=2, head_dim=6, hidden_size=41, intermediate_size=88, vocab_size=101, files=1
)
CODED = TinyModel(layers=1, heads=8, kv_heads=2, head_dim=8, intermediate_size=96, files=1)


# --- models


def of_family(model_type: str, changes: dict[str, Any], folder: Path) -> Path:
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    write_checkpoint(transformers, model_type, changes, folder=folder)
    return folder


def of_case(name: str, changes: dict[str, Any], folder: Path) -> Path:
    model_type, own = FAMILY_CASES[name]
    return of_family(model_type, {**own, **changes}, folder)


def as_written(model: TinyModel, folder: Path) -> Path:
    return write_tiny_model(folder, model=model)


def with_views(model: TinyModel, folder: Path) -> Path:
    """Tensors that lie transposed, or with gaps, in a pickle."""
    tensors = load_file(write_tiny_model(folder / "original", model=model) / "model.safetensors")
    shutil.copy(folder / "original" / "config.json", folder)
    views(folder, tensors)
    return folder


def of_words(form: str, family: str, folder: Path) -> Path:
    encode, config = word_packed.FORMS[form]
    model = CODED if family == "llama" else TinyModel(layers=1, family=family, heads=8, head_dim=8, files=1)
    return write_coded(folder, encode, config=config, model=model)[0]


def of_compressed(form: str, family: str, folder: Path) -> Path:
    encode, weights = compressed.FORMS[form]
    torch.manual_seed(0)
    model = CODED if family == "llama" else TinyModel(layers=1, family=family, heads=8, head_dim=8, files=1)
    return write_coded(folder, encode, config=compressed_config(weights), model=model)[0]


def of_modelopt(algorithm: str, family: str, folder: Path) -> Path:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    encode, _ = modelopt.ALGORITHMS[algorithm]
    return modelopt.write_modelopt(folder, encode, quantization, family=family, files=1)[0]


def of_bitsandbytes(form: str, family: str, folder: Path) -> Path:
    encode = bitsandbytes.eight_bits if form == "int8" else bitsandbytes.FORMS[form]
    config = bitsandbytes.EIGHT_BITS if form == "int8" else bitsandbytes.FOUR_BITS
    model = TinyModel(layers=1, family=family, files=1)
    return write_coded(folder, encode, config=config, model=model)[0]


def of_blocks(height: int, width: int, family: str, folder: Path) -> Path:
    config = {**FP8, "weight_block_size": [height, width]}
    model = CODED if family == "llama" else TinyModel(layers=1, family=family, heads=8, head_dim=8, files=1)
    return write_coded(folder, in_blocks(height, width, torch.float32), config=config, model=model)[0]


def of_deepseek(folder: Path) -> Path:
    four = replace(deepseek.TINY, heads=4)
    generator = torch.Generator().manual_seed(7)
    tensors = {row.name: deepseek.numbers(row, generator) for row in tensor_table(four)}
    write_index(folder, four)
    for file in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    return folder


def coded_experts(form: str, folder: Path) -> Path:
    """Each expert's projections by themselves, in words of codes."""
    encode, stated = word_packed.FORMS[form]
    changes = {
        "hidden_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 32, "num_experts": word_packed.EXPERTS,
        "num_experts_per_tok": 2, "head_dim": 16,
    }  # fmt: skip
    raw = raw_config("qwen3_moe", **changes)
    coded = dict(word_packed.expert_weights(parse_config(raw)))
    for name in [name for name in coded if ".experts." in name]:
        made = encode(name, coded.pop(name))
        assert made is not None
        coded |= {f"{name.removesuffix('.weight')}.{leaf}": tensor.contiguous() for leaf, tensor in made[0].items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": stated}), encoding="utf-8")
    save_file(coded, folder / "model.safetensors")
    return folder


def mxfp4_experts(folder: Path) -> Path:
    """gpt-oss as it is published: five experts in one tensor, gate and up in turns."""
    of_family("gpt_oss", {**gpt_oss_coded.CHANGES, **HEADS}, folder / "original")
    wide = load_file(folder / "original" / "model.safetensors")
    coded = {name: tensor.bfloat16() for name, tensor in wide.items()}
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in wide if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = wide[name].shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
        del coded[name]
        coded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return gpt_oss_coded.write(folder, "coded", coded, gpt_oss_coded.CONFIG)


def turned_experts(folder: Path) -> Path:
    """gpt_oss with experts [out, in]."""
    of_case("gpt_oss", {**HEADS, "intermediate_size": 40, "vocab_size": 160}, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 3:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder


def of_gguf(kind: str, folder: Path) -> Path:
    return gguf_types.write_model(folder / "model.gguf", kind)


Write = Callable[[Path], Path]
MOE = {"num_attention_heads": 4, "moe_intermediate_size": 40}
DENSE: dict[str, Write] = {
    "llama": partial(as_written, ODD),
    "llama, tied": partial(as_written, TinyModel(layers=2, heads=8, kv_heads=4, tied=True, vocab_size=70, files=1)),
    "phi3": partial(as_written, TinyModel(layers=1, family="phi3", heads=8, head_dim=8, intermediate_size=88, files=1)),
    "gemma2": partial(as_written, TinyModel(layers=2, family="gemma2", heads=8, tied=True, files=1)),
    "views": partial(with_views, TinyModel(layers=1, heads=8, kv_heads=2, head_dim=8, files=1)),
    "views, phi3": partial(with_views, TinyModel(layers=1, family="phi3", heads=8, head_dim=8, files=1)),
    "gpt2": partial(of_case, "gpt2", {**SIZES, **HEADS}),
    "gpt2, untied": partial(of_case, "gpt2 untied, square", {**SIZES, **HEADS}),
    "olmo2": partial(of_case, "olmo2 bias, tied", {**SIZES, **HEADS}),
    "cohere": partial(of_case, "cohere norms, bias", {**SIZES, **HEADS}),
    "stablelm": partial(of_case, "stablelm parallel, norms, bias", {**SIZES, **HEADS}),
    "glm": partial(of_case, "glm", {**SIZES, **HEADS}),
    **{f"gptq: {form}": partial(of_words, form, "llama") for form in word_packed.FORMS},
    **{f"gptq: {form}, phi3": partial(of_words, form, "phi3") for form in ("gptq_ordered", "gptq_3", "awq")},
    **{f"compressed: {form}": partial(of_compressed, form, "llama") for form in compressed.FORMS},
    **{f"compressed: {form}, phi3": partial(of_compressed, form, "phi3") for form in ("int4_asym", "nvfp4", "fp8")},
    **{f"modelopt: {form}": partial(of_modelopt, form, "llama") for form in modelopt.ALGORITHMS},
    **{f"modelopt: {form}, phi3": partial(of_modelopt, form, "phi3") for form in ("FP8", "fp8_pb_wo", "NVFP4")},
    **{f"bitsandbytes: {form}": partial(of_bitsandbytes, form, "llama") for form in (*bitsandbytes.FORMS, "int8")},
    "bitsandbytes: nf4 nested, phi3": partial(of_bitsandbytes, "nf4 nested", "phi3"),
    **{f"fp8: {h}x{w}": partial(of_blocks, h, w, "llama") for h, w in ((128, 128), (48, 20), (1, 128), (128, 1))},
    "fp8: 24x40, phi3": partial(of_blocks, 24, 40, "phi3"),
    **{f"gguf: {kind}": partial(of_gguf, kind) for kind in ("Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL")},
}  # fmt: skip
EXPERTS: dict[str, Write] = {
    "mixtral": partial(of_case, "mixtral", {**SIZES, **HEADS}),
    "qwen2_moe": partial(of_case, "qwen2_moe", {**SIZES, **HEADS, "moe_intermediate_size": 40}),
    "qwen3_moe": partial(of_case, "qwen3_moe", {**SIZES, **HEADS, "moe_intermediate_size": 24}),
    "olmoe": partial(of_case, "olmoe", {**SIZES, **HEADS}),
    "gpt_oss": partial(of_case, "gpt_oss", {**SIZES, **HEADS}),
    "gpt_oss, turned": turned_experts,
    "gpt_oss, mxfp4": mxfp4_experts,
    "deepseek_v2": partial(of_case, "deepseek_v2 groups, yarn, bias", {**SIZES, **LATENT_HEADS}),
    "deepseek_v3": partial(of_case, "deepseek_v3", {**SIZES, **LATENT_HEADS}),
    "deepseek_v3, fp8": of_deepseek,
    **{f"experts: {form}": partial(coded_experts, form) for form in ("gptq_ordered", "awq", "gptq")},
}  # fmt: skip
MODELS = {**DENSE, **EXPERTS}


class Folders:
    """Each model, written when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._formats = formats.Models(root / "formats")
        self._written: dict[str, Path] = {}

    def of(self, name: str) -> tuple[Path, str]:
        """Where it is, and its load format."""
        if name in formats.FORMATS:
            return self._formats.folder(name, "none")
        if name not in self._written:
            folder = self._root / "".join(c if c.isalnum() else "-" for c in name)
            folder.mkdir()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._written[name] = MODELS[name](folder)
        return self._written[name], "auto"


# --- ways


@dataclass(frozen=True)
class Way:
    """How a model is cut and read. `item_nbytes`: about as many bytes are loaded at once; `least_row`: shorter rows are
    read whole where columns are wanted."""

    mesh: Mapping[str, Any]
    scheme: str = "none"
    strategy: str = "direct"
    reader: str = "threads"
    item_nbytes: int = 1 << 20
    least_row: int = 256
    more: Mapping[str, Any] = field(default_factory=dict)


TENSOR: list[dict[str, Any]] = [{"tensor_parallel_size": ranks} for ranks in (2, 4, 8)]
EXPERT: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2},
    {"expert_parallel_size": 2, "expert_map": [[0, 2, 4], [1, 0, 3, 2, 4]]},
    {"expert_parallel_size": 3, "expert_placement": "round_robin"},
    {"tensor_parallel_size": 2, "expert_parallel_size": 4},
    {"tensor_parallel_size": 4},
    {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_placement": "round_robin"},
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
]
ITEMS = (200, 700, 3000, 20000, 1 << 20)
LARGE = ("gguf: ", "deepseek_v3, fp8")  # of which items of a row would be thousands
READERS = ("threads", "threads", "process")


def options_of(way: Way, load_format: str, *, cut: bool) -> LoadOptions:
    reading: dict[str, Any] = {} if load_format == "dummy" else {"safetensors_load_strategy": way.strategy}
    return LoadOptions(
        load_format=load_format, reader=way.reader, quantization=way.scheme, window="192KiB",
        **reading, **(way.mesh if cut else {}), **way.more,
    )  # fmt: skip


def check(folders: Folders, name: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> list[Prepared]:
    folder, load_format = folders.of(name)
    monkeypatch.setattr("streaming.prepare.make_plan", partial(make_plan, item_nbytes=way.item_nbytes))
    monkeypatch.setattr("streaming.column_reads.LEAST_ROW_NBYTES", way.least_row)
    return check_parts(str(folder), options_of(way, load_format, cut=True), options_of(way, load_format, cut=False))


def schemes_of(name: str) -> Sequence[str]:
    """What it can be kept in: codes of other forms than float8 are kept as they are."""
    coded = name.partition(":")[0] in ("gptq", "compressed", "modelopt", "bitsandbytes", "experts")
    return ("none",) if coded or name == "gpt_oss, mxfp4" else SCHEMES


def meshes_of(name: str) -> Sequence[Mapping[str, Any]]:
    """Those that fit its heads, experts and layers."""
    if name in formats.FORMATS or name.startswith(("gguf", "bitsandbytes", "modelopt")):
        return TENSOR[:2]
    if name.startswith("experts"):  # one layer of three experts
        return [EXPERT[0], EXPERT[2], EXPERT[5]]
    if name in EXPERTS:
        return [one for one in EXPERT if "expert_map" not in one or name in ("mixtral", "olmoe", "gpt_oss")]
    return TENSOR


def random_way(name: str, turn: int) -> Way:
    """Another one for each turn, and always the same."""
    rng = random.Random(f"{name} {turn}")
    scheme = rng.choice(schemes_of(name))
    more: dict[str, Any] = {}
    if scheme != "none":
        more["quantize_head"] = rng.random() < 0.5
    if scheme.startswith(("fp8_per", "int8")) and rng.random() < 0.3:
        more["scale_percentile"] = rng.choice([90.0, 99.5])
    if rng.random() < 0.3:
        more["dtype"] = rng.choice(["float32", "float16", "bfloat16"])
    meshes = meshes_of(name)
    return Way(
        meshes[turn % len(meshes)], scheme, rng.choice(formats.STRATEGIES), rng.choice(READERS),
        rng.choice(ITEMS[3 * name.startswith(LARGE) :]), rng.choice([8, 32, 256]), more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("cuts")
    (root / "formats").mkdir()
    return Folders(root)


def check_or_refused(folders: Folders, name: str, way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two codes share a byte: a part that would begin with the second one is refused, and nothing else is."""
    refusal = None
    try:
        check(folders, name, way, monkeypatch)
    except ShardError as error:
        refusal = str(error)
    if refusal is not None:
        found = re.search(r"columns \d+ to \d+ of (\d+) are cut at \d+, within a byte of 2 numbers", refusal)
        assert found, refusal
        assert int(found[1]) // way.mesh["tensor_parallel_size"] % 2 == 1


QUICK = (
    "phi3", "views", "gguf: Q4_K", "gptq: gptq_ordered", "compressed: int8_packed", "fp8: 48x20", "gpt2", "gpt_oss",
    "deepseek_v3, fp8",
)  # fmt: skip
FORMATS = [name for name in formats.FORMATS if name != "sharded_state"]


@pytest.mark.parametrize("name", QUICK)
def test_every_rank_keeps_its_part(name: str, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    check_or_refused(folders, name, random_way(name, 0), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("name", [*MODELS, *FORMATS])
def test_every_rank_keeps_its_part_in_many_ways(
    name: str, turn: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_or_refused(folders, name, random_way(name, turn), monkeypatch)


# --- what was found wrong once


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("compressed: mxfp4", Way(TENSOR[1])),  # 24 columns of blocks of 32: whose scales are repeated
        ("compressed: nvfp4", Way(TENSOR[2])),
        ("compressed: int4", Way(TENSOR[2], least_row=8)),  # 6 bytes of words of 4
        ("gpt_oss, mxfp4", Way(TENSOR[2])),  # gate and up take turns, and their scales are read whole
        ("bitsandbytes: nf4 nested", Way(TENSOR[1])),  # 16 columns of a row that has one block of 64
        ("npcache", Way(TENSOR[1], scheme="int8_per_channel", strategy="lazy")),  # a rank without rows of the table
    ],
    ids=str,
)
def test_parts_that_are_no_whole_blocks_words_or_rows(
    name: str, way: Way, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(folders, name, way, monkeypatch)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3, fp8", "qwen3_moe"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_read_each_expert_once(name: str, ranks: int, folders: Folders) -> None:
    """Together as many bytes of experts as one rank alone, for any split of them."""

    def expert_nbytes(rank: int, **mesh: Any) -> int:
        items = prepare(str(folder), LoadOptions(**mesh), rank=rank).plan.items
        return sum(item.read_nbytes for item in items if ".experts." in item.param.name)

    folder, _ = folders.of(name)
    shares = [expert_nbytes(rank, expert_parallel_size=ranks) for rank in range(ranks)]
    assert min(shares) > 0
    assert sum(shares) == expert_nbytes(0)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("llama", ["--tensor-parallel-size", "3"], "size 3 does not divide the model's 8 attention heads"),
        ("llama", ["--expert-parallel-size", "2"], "expert parallel size 2: the model has no experts that ranks could"),
        ("mixtral", ["--expert-parallel-size", "6"], "expert parallel size 6 for 5 experts: each rank needs one"),
        ("llama", ["--pipeline-parallel-size", "3"], "3 stages for 2 layers: each stage needs one"),
        (
            "llama", ["--tensor-parallel-size", "8", "--quantization", "int4_per_group"],
            "down_proj.weight: int4_per_group: columns 0 to 11 of 88 are cut at 11, within a byte of 2 numbers",
        ),
        (
            "mixtral", ["--expert-parallel-size", "2", "--expert-map", "[[0, 1], [2, 3]]"],
            "the expert map leaves out expert 4 (1 of 5 in all)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_in_one_line(
    name: str, options: list[str], words: str, folders: Folders, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, _ = folders.of(name)
    capfd.readouterr()
    assert cli.run(["plan", str(folder), *options]) == 1
    captured = capfd.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
