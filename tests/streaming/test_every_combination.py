"""One model in every format, read by every strategy and reader, kept in every scheme: always the same stored bytes, and
as many bytes read as the plan says."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel, write_tiny_model
from quant.registry import scheme_names
from streaming import cli
from streaming.device import open_device
from streaming.options import LoadOptions
from streaming.pipeline import Pipeline
from streaming.prepare import Prepared, prepare
from streaming.reader_choice import start_reader
from streaming.residency import Residency
from streaming.sources import Source
from streaming.trace import Tracer
from tests.layers.tiny import raw_config
from tests.streaming.checkpoint.build import write_gguf
from tests.streaming.checkpoint.test_mistral import own_layout
from tests.streaming.checkpoint.test_tensorizer_file import serialized
from tests.streaming.remote.range_server import serving
from tests.streaming.resident import resident_model, same_bits
from tests.streaming.test_pickle_models import big_endian, legacy, plain, view_of, views

Tensors = dict[str, torch.Tensor]
Writer = Callable[[Path, Tensors], None]
MODEL = TinyModel(layers=2, files=1, seed=7)
STRATEGIES = ("lazy", "eager", "prefetch", "direct")
READERS = ("process", "threads")
WINDOW = "96KiB"  # far less than the model: the window goes round, and readers wait


def as_dtype(dtype: torch.dtype) -> Writer:
    """The same numbers in a wider dtype, which widening keeps exactly."""

    def write(root: Path, tensors: Tensors) -> None:
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, root / "model.safetensors")

    return write


def two_files(root: Path, tensors: Tensors) -> None:
    names = list(tensors)
    place = {name: f"model-0000{1 + 2 * turn // len(names)}-of-00002.safetensors" for turn, name in enumerate(names)}
    for file in set(place.values()):
        save_file({name: tensors[name] for name in names if place[name] == file}, root / file)
    index = {"metadata": {}, "weight_map": place}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


def mistral(root: Path, tensors: Tensors) -> None:
    own = dict(own_layout(name, tensor) for name, tensor in tensors.items())
    save_file(own, root / "consolidated.safetensors")
    params = {
        "dim": 64, "n_layers": 2, "head_dim": 16, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 160, "hidden_dim": 96,
        "norm_eps": 1e-5, "rope_theta": 1e4,
    }  # fmt: skip
    (root / "params.json").write_text(json.dumps(params))


def tensorizer(root: Path, tensors: Tensors) -> None:
    serialized(root / "model.tensors", tensors)


def as_gguf(kind: str, *, big: bool = False) -> Writer:
    """As llama.cpp's converter writes it: q and k permuted, norms in float32, matrices of `kind`."""

    def write(root: Path, tensors: Tensors) -> None:
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, MODEL.layers)
        found: dict[str, np.ndarray[Any, Any]] = {}
        for name, tensor in tensors.items():
            target = names.get_name(name, try_suffixes=(".weight",))
            whole = own_layout(name, tensor)[1].contiguous()
            if kind == "BF16" and whole.ndim == 2:
                found[target] = whole.view(torch.uint8).view(whole.shape[0], -1).numpy()
            else:
                found[target] = whole.float().numpy()
        stored = {name: "BF16" for name, values in found.items() if values.dtype == np.uint8}
        keys = {
            "llama.embedding_length": 64, "llama.feed_forward_length": 96, "llama.block_count": 2,
            "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.context_length": 512,
            "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0, "llama.vocab_size": 160,
            "tokenizer.ggml.tokens": [f"token {i}" for i in range(160)],
        }  # fmt: skip
        write_gguf(root / "model.gguf", keys=keys, tensors=found, stored=stored, big_endian=big)

    return write


@dataclass(frozen=True)
class Way:
    """One way to keep the model on disk; `load_format`: how it is asked for."""

    write: Writer
    load_format: str = "auto"


WAYS = {
    "safetensors": Way(as_dtype(torch.bfloat16)), "two files": Way(two_files), "F32": Way(as_dtype(torch.float32)),
    "F64": Way(as_dtype(torch.float64)), "bin": Way(plain), "legacy": Way(legacy, "pt"), "views": Way(views),
    "big-endian": Way(big_endian), "npcache": Way(plain, "npcache"),
    "npcache, big-endian": Way(big_endian, "npcache"), "mistral": Way(mistral),
    "tensorizer": Way(tensorizer, "tensorizer"),
    "gguf": Way(as_gguf("F32")), "gguf, BF16": Way(as_gguf("BF16")), "gguf, big-endian": Way(as_gguf("F32", big=True)),
}  # fmt: skip
FORMATS = (*WAYS, "sharded_state", "dummy")


class Models:
    """The model in every format, each written when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.original = write_tiny_model(root / "original", model=MODEL)
        self._tensors = load_file(self.original / "model.safetensors")
        self.expected = lru_cache(maxsize=None)(self._expected)

    def folder(self, name: str, scheme: str) -> tuple[Path, str]:
        """Where it is, and its load format."""
        if name == "sharded_state":
            return self._shards(scheme), name
        if name == "dummy":
            return self.original, name
        if name == "tensorizer":
            pytest.importorskip("tensorizer")
        folder = self._root / name.replace(", ", "-").replace(" ", "-")
        if not folder.exists():
            folder.mkdir()
            shutil.copy(self.original / "config.json", folder)
            WAYS[name].write(folder, self._tensors)
        return folder, WAYS[name].load_format

    def _shards(self, scheme: str) -> Path:
        folder = self._root / f"shards-{scheme}"
        if not folder.exists():
            given = ["save-shards", str(self.original), "--out", str(folder), "--quantization", scheme, "--quiet"]
            assert cli.run(given) == 0
        return folder

    def _expected(self, scheme: str) -> Tensors:
        return dict(resident_model(self.original, quantization=scheme).named_parameters())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("formats"))


def load(prepared: Prepared) -> tuple[Tensors, int]:
    """Every stored tensor by its full name, and the bytes that were read for them."""
    tracer = Tracer()
    with closing(start_reader(prepared)) as reader, closing(open_device("cpu", prepared.plan, reader)) as device:
        layers = [layer.name for layer in prepared.plan.layers if layer.spec.params]
        anyio.run(Pipeline(prepared.plan, reader, device, Residency(layers, tracer), tracer).run)
        found = {
            f"{param.rpartition('.')[0]}.{name}": tensor.clone()
            for param, tensors in device.stored.items()
            for name, tensor in tensors.items()
        }
    return found, sum(int(span.args["nbytes"]) for span in tracer.spans() if span.lane == "read")


Case = tuple[str, str, str, str]  # format, strategy, reader, scheme


def everyday_cases() -> Iterator[Case]:
    """Every format by every strategy, while readers and schemes take turns, so that each format meets each of them."""
    for row, (name, (column, strategy)) in enumerate(itertools.product(FORMATS, enumerate(STRATEGIES))):
        turn = row // len(STRATEGIES) + column
        yield name, strategy, READERS[turn % 2], scheme_names()[(turn + row) % len(scheme_names())]


def check(models: Models, case: Case) -> None:
    name, strategy, reader, scheme = case
    folder, load_format = models.folder(name, scheme)
    how: dict[str, Any] = {} if name == "dummy" else {"safetensors_load_strategy": strategy}
    options = LoadOptions(
        load_format=load_format,
        reader=reader,
        quantization=scheme,
        window=WINDOW,
        dtype="auto" if name == "sharded_state" else "bfloat16",
        **how,
    )
    prepared = prepare(str(folder), options)
    found, read_nbytes = load(prepared)
    assert read_nbytes == prepared.plan.read_nbytes
    if name == "dummy":
        expected, _ = load(
            prepare(str(folder), LoadOptions(load_format="dummy", reader="threads", quantization=scheme))
        )
    else:
        expected = models.expected(scheme)
        held = sum(tensor.nbytes for tensor in expected.values())
        assert prepared.plan.kept_nbytes == held
    assert found.keys() == expected.keys()
    assert [key for key in expected if not same_bits(found[key], expected[key])] == []


@pytest.mark.filterwarnings("ignore")  # tensorizer's own
@pytest.mark.parametrize("case", list(everyday_cases()), ids="-".join)
def test_every_way_to_load_a_model_keeps_the_same_bytes(models: Models, case: Case) -> None:
    check(models, case)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", list(itertools.product(FORMATS, STRATEGIES, READERS, scheme_names())), ids="-".join)
def test_all_ways_to_load_a_model_keep_the_same_bytes(models: Models, case: Case) -> None:
    check(models, case)


BY_BACK_END = [("mistral", "runai_streamer"), ("gguf", "runai_streamer")]  # it reads what `auto` would take


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "back_end"), [*((name, None) for name in FORMATS), *BY_BACK_END])
def test_verify_agrees_whatever_the_format(
    models: Models, name: str, back_end: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own side reads with each format's own package."""
    if back_end is not None and find_spec("runai_model_streamer") is None:
        pytest.skip("runai_model_streamer is not installed")
    folder, load_format = models.folder(name, "none")
    load_format = back_end or load_format
    given = ["verify", str(folder), "--load-format", load_format, "--quiet", "--json", "--ids", "1,2,3"]
    assert cli.run(given) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (found["equal"], found["differences"], found["logits"]) == (True, [], 2 * 3 * 160)


GPT2 = {
    "wte.weight": (101, 48), "wpe.weight": (128, 48), "ln_f.weight": (48,), "ln_f.bias": (48,),
    **{f"h.{i}.{name}": shape for i in range(2) for name, shape in {
        "ln_1.weight": (48,), "ln_1.bias": (48,), "ln_2.weight": (48,), "ln_2.bias": (48,),
        "attn.c_attn.weight": (48, 144), "attn.c_attn.bias": (144,), "attn.c_proj.weight": (48, 48),
        "attn.c_proj.bias": (48,), "mlp.c_fc.weight": (48, 192), "mlp.c_fc.bias": (192,),
        "mlp.c_proj.weight": (192, 48), "mlp.c_proj.bias": (48,),
    }.items()},
}  # fmt: skip


@pytest.fixture(scope="module")
def transposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, whose matrices are [in, out] on disk and whose one tensor is all three of q, k and v."""
    folder = tmp_path_factory.mktemp("gpt2")
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in GPT2.items()}
    save_file(tensors, folder / "model.safetensors")
    changes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 192}
    config = raw_config("gpt2", tie_word_embeddings=True, torch_dtype="bfloat16", **changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("scheme", scheme_names())
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_matrices_that_lie_transposed_are_the_same_in_every_way(transposed: Path, strategy: str, scheme: str) -> None:
    expected = dict(resident_model(transposed, quantization=scheme).named_parameters())
    options = LoadOptions(safetensors_load_strategy=strategy, quantization=scheme, reader="threads")
    prepared = prepare(str(transposed), options)
    found, read_nbytes = load(prepared)
    assert read_nbytes == prepared.plan.read_nbytes
    assert found.keys() == expected.keys()
    assert [key for key in expected if not same_bits(found[key], expected[key])] == []


@pytest.mark.parametrize("scheme", scheme_names())
def test_a_remote_model_keeps_the_same_bytes(
    models: Models, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLAYER_CACHE", str(tmp_path))
    folder, _ = models.folder("two files", scheme)
    with serving(folder) as server:
        prepared = prepare(server.url, LoadOptions(quantization=scheme, window=WINDOW))
        found, read_nbytes = load(prepared)
    assert read_nbytes == prepared.plan.read_nbytes
    expected = models.expected(scheme)
    assert [key for key in expected if not same_bits(found[key], expected[key])] == []


@pytest.mark.parametrize("scheme", scheme_names())
def test_a_model_of_two_sources_keeps_the_same_bytes(models: Models, scheme: str, tmp_path: Path) -> None:
    """The second one is of another format, and its names lack what they begin with in the model."""
    tensors = load_file(models.original / "model.safetensors")
    second = {name: tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.1.")}
    (tmp_path / "first").mkdir()
    shutil.copy(models.original / "config.json", tmp_path / "first")
    save_file(tensors, tmp_path / "first" / "model.safetensors")
    torch.save({name.removeprefix("model.layers."): view_of(t, 0) for name, t in second.items()}, tmp_path / "part.bin")
    sources = (Source(path=str(tmp_path / "part.bin"), prefix="model.layers."),)
    prepared = prepare(str(tmp_path / "first"), LoadOptions(quantization=scheme, window=WINDOW, sources=sources))
    found, read_nbytes = load(prepared)
    assert read_nbytes == prepared.plan.read_nbytes
    expected = models.expected(scheme)
    assert [key for key in expected if not same_bits(found[key], expected[key])] == []
