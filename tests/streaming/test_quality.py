"""Quality: the numbers against numpy, what is not measured, the picture, and one line for each mistake."""

from __future__ import annotations

import io
import json
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from examples.write_tiny_model import TinyModel, write_tiny_model
from streaming import LLM, OptionError, Quality, cli, measure_quality
from streaming import one_layer as loader
from streaming.commands.quality import Progress, quality_lines
from streaming.errors import CheckpointError
from streaming.hooks import Hooks
from streaming.quality_measures import logits_sums
from streaming.quality_passage import PASSAGE
from streaming.quality_plot import render_plot, write_plot
from streaming.quality_report import LayerQuality, Noise, SchemeQuality
from streaming.quality_text import Run, cut_into_runs, encode_text
from tests.layers.tiny import some_ids

Array = NDArray[np.float64]
IDS = some_ids(33, vocab_size=160, seed=5)
SVG = "{http://www.w3.org/2000/svg}"


def printable_tokenizer() -> dict[str, Any]:
    """A byte-level tokenizer of single printable characters, which begins every text with <s>."""
    characters = ["Ġ", "Ċ", *(chr(code) for code in range(33, 127))]
    special = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True},
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(["<s>", *characters])}, "merges": []},
    }  # fmt: skip


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model of two layers that has a tokenizer."""
    folder = write_tiny_model(tmp_path_factory.mktemp("quality") / "model", model=TinyModel(layers=2, tied=True))
    (folder / "tokenizer.json").write_text(json.dumps(printable_tokenizer()), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def small(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    """A model of two layers without a tokenizer, its head of its own."""
    return tiny_folder(TinyModel(layers=2))


# --- against numpy --------------------------------------------------------------------------------------------------


def outputs_and_logits(folder: Path, ids: Sequence[int], quantization: str) -> tuple[dict[str, Array], Array]:
    """What an ordinary load computes: every layer's output and the logits, as float64."""
    outputs: dict[str, Array] = {}
    hooks = Hooks(layer_outputs=lambda name, hidden: outputs.update({name: hidden.double().numpy().copy()}))
    with LLM(folder, quantization=quantization, dtype="float32", hooks=hooks) as llm:
        return outputs, llm.logits(ids).double().numpy()


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def int8_noise(folder: Path, layer: int | str, modules: Sequence[str]) -> tuple[float, float]:
    """Sums of squares of a layer's weights and of what int8 changes in them: codes times their row's scale."""
    wide = LLM.load_layer(folder, layer, dtype="float32")
    kept = LLM.load_layer(folder, layer, dtype="float32", quantization="int8_per_channel", quantize_head=True)
    signal = noise = 0.0
    for module in modules:
        weight = wide[f"{module}.weight"].double().numpy()
        scale = kept[f"{module}.weight_scale"].float().numpy().reshape(-1, 1)
        found = kept[f"{module}.weight"].numpy().astype(np.float32) * scale
        signal += float((weight**2).sum())
        noise += float(((weight - found.astype(np.float64)) ** 2).sum())
    return signal, noise


def test_numbers_are_those_that_numpy_finds(small: Path) -> None:
    found = measure_quality(small, ["int8_per_channel"], text=IDS, dtype="float32")
    wide_outputs, wide = outputs_and_logits(small, IDS, "none")
    outputs, logits = outputs_and_logits(small, IDS, "int8_per_channel")
    expected, log_probs = log_softmax(wide[:-1]), log_softmax(logits[:-1])
    (scheme,) = found.schemes
    kl = float((np.exp(expected) * (expected - log_probs)).sum(-1).mean())
    assert kl > 1e-6
    assert scheme.kl_divergence == pytest.approx(kl, rel=1e-3)
    assert scheme.top1_agreement == (wide[:-1].argmax(-1) == logits[:-1].argmax(-1)).mean()
    rows, targets = np.arange(len(IDS) - 1), np.array(IDS[1:])
    assert found.perplexity == pytest.approx(float(np.exp(-expected[rows, targets].mean())), rel=1e-5)
    assert scheme.perplexity == pytest.approx(float(np.exp(-log_probs[rows, targets].mean())), rel=1e-5)
    assert (found.tokens, found.positions, found.runs, found.tokens_left_out) == (33, 32, 1, 0)
    for layer in scheme.layers:
        ratios = ((outputs[layer.name] - wide_outputs[layer.name]) ** 2).sum(-1) / (wide_outputs[layer.name] ** 2).sum(
            -1
        )
        assert layer.outputs_db == pytest.approx(-10 * math.log10(ratios.mean()), abs=1e-2)


def test_sqnr_of_weights_is_that_of_codes_times_scales(small: Path) -> None:
    found = measure_quality(small, ["int8_per_channel"], text=IDS, dtype="float32", quantize_head=True)
    (scheme,) = found.schemes
    assert [layer.name for layer in scheme.layers] == ["layers.0", "layers.1", "head"]
    modules = [[f"model.layers.{index}.{name}" for name in LINEAR] for index in range(2)]
    sums = [
        *(int8_noise(small, index, names) for index, names in enumerate(modules)),
        int8_noise(small, "head", ["lm_head"]),
    ]
    for layer, (signal, noise) in zip(scheme.layers, sums, strict=True):
        assert layer.weights_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-9)
    total = 10 * math.log10(sum(signal for signal, _ in sums) / sum(noise for _, noise in sums))
    assert scheme.sqnr_db == pytest.approx(total, abs=1e-9)
    assert scheme.layers[-1].outputs is None
    assert scheme.weights.count == 160 * 64 + 2 * (128 * 64 + 64 * 64 + 3 * 96 * 64)


LINEAR = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def test_a_tied_head_is_held_against_the_table(with_tokenizer: Path) -> None:
    found = measure_quality(with_tokenizer, ["int8_per_channel"], text=IDS, quantize_head=True)
    head = found.schemes[0].layers[-1]
    assert (head.name, head.weights.count) == ("head", 160 * 64)
    assert head.weights_db is not None
    assert head.weights_db > 35.0


def test_the_wide_model_against_itself_differs_nowhere(four_layers: Path) -> None:
    found = measure_quality(four_layers, ["none", "fp8_per_channel"], text=IDS)
    same, other = found.schemes
    assert (same.kl_divergence, same.top1_agreement, same.perplexity) == (0.0, 1.0, found.perplexity)
    assert (same.sqnr_db, same.weights.count) == (None, 0)
    assert {layer.outputs_db for layer in same.layers} == {math.inf}
    assert other.kl_divergence > 0.0
    assert all(layer.weights_db is not None and 25.0 < layer.weights_db < 40.0 for layer in other.layers)


def test_runs_begin_anew(small: Path) -> None:
    found = measure_quality(small, ["fp8_per_channel"], text=IDS[:20], max_tokens=18, max_model_len=8, dtype="float32")
    losses = []
    for start, stop in ((0, 8), (8, 16), (16, 18)):
        expected = log_softmax(outputs_and_logits(small, IDS[start:stop], "none")[1])
        losses += [-expected[row, token] for row, token in enumerate(IDS[start + 1 : stop])]
    assert found.perplexity == pytest.approx(float(np.exp(np.mean(losses))), rel=1e-5)
    assert (found.runs, found.positions, found.tokens, found.tokens_left_out) == (3, 15, 18, 2)


def test_cache_and_activations_are_the_schemes_own(small: Path) -> None:
    plain = measure_quality(small, ["none"], text=IDS)
    cached = measure_quality(small, ["none"], text=IDS, kv_cache_dtype="int4")
    coded = measure_quality(small, ["none"], text=IDS, activation_dtype="int8")
    assert plain.perplexity == cached.perplexity == coded.perplexity
    assert cached.schemes[0].kl_divergence > 0.0
    assert coded.schemes[0].kl_divergence > 0.0


def test_tokens_that_are_impossible_to_both_add_nothing() -> None:
    logits = torch.tensor([[0.0, -math.inf, math.log(3.0)]])
    sums = logits_sums(logits, logits.clone(), torch.tensor([2]))
    assert (sums.positions, sums.divergence, sums.agreed) == (1, 0.0, 1)
    assert sums.loss == pytest.approx(math.log(4.0 / 3.0))
    other = logits_sums(logits, torch.tensor([[math.log(3.0), -math.inf, 0.0]]), torch.tensor([2]))
    assert other.divergence == pytest.approx(0.5 * math.log(3.0))  # (1/4 - 3/4) log(1/3)
    assert other.agreed == 0


def test_ratios_of_sums() -> None:
    assert Noise(3, 200.0, 2.0).sqnr_db == pytest.approx(20.0)
    assert Noise().sqnr_db is None
    assert Noise(1, 1.0, 0.0).sqnr_db == math.inf
    assert math.isnan(Noise(1, math.nan, 1.0).sqnr_db or 0.0)
    assert Noise(1, 0.0, 1.0).sqnr_db == -math.inf


def test_only_a_wide_layer_is_held_when_the_next_is_loaded(four_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, list[weakref.ref[torch.Tensor]]]] = []
    load = loader.load_one_layer

    def noted(prepared: Any, layer: str) -> dict[str, torch.Tensor]:
        held = [name for name, tensors in loaded if any(tensor() is not None for tensor in tensors)]
        assert held == ([] if prepared.options.quantization == "none" else [layer])  # the wide one
        tensors = load(prepared, layer)
        loaded.append((layer, [weakref.ref(tensor) for tensor in tensors.values()]))
        return tensors

    monkeypatch.setattr("streaming.quality_walk.load_one_layer", noted)
    measure_quality(four_layers, ["fp8_per_channel", "int8_per_channel"], text=IDS)
    assert [name for name, _ in loaded] == [f"layers.{index}" for index in range(4) for _ in range(3)] + ["head"]


# --- the text -------------------------------------------------------------------------------------------------------


def test_text_is_cut_into_runs_behind_what_begins_every_text() -> None:
    assert cut_into_runs([5, 6, 7, 8, 9], prefix=[], length=3) == (Run((5, 6, 7), 1), Run((8, 9), 1))
    assert cut_into_runs([5, 6, 7], prefix=[1], length=3) == (Run((1, 5, 6), 1), Run((1, 7), 1))
    assert cut_into_runs([5, 6, 7], prefix=[1, 2], length=9) == (Run((1, 2, 5, 6, 7), 2),)
    assert cut_into_runs([5, 6, 7], prefix=[], length=2) == (Run((5, 6), 1),)  # the last one predicts nothing
    assert Run((1, 2, 5, 6, 7), 2).targets == (5, 6, 7)


@pytest.mark.parametrize(
    ("ids", "prefix", "length", "words"),
    [
        ([5], [], 8, "too short: it has 1 token,"),
        ([], [1], 8, "too short: it has 0 tokens,"),
        ([5, 6], [1, 2], 2, "--max-model-len 2"),
        ([5, 6], [], 1, "--max-model-len 1"),
    ],
)
def test_a_text_that_predicts_nothing_is_refused(ids: list[int], prefix: list[int], length: int, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        cut_into_runs(ids, prefix=prefix, length=length)


class Framed:
    """A tokenizer of characters that frames every text."""

    def __init__(self, front: list[int], back: list[int]) -> None:
        self.front, self.back = front, back

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = [ord(character) for character in text]
        return [*self.front, *ids, *self.back] if add_special_tokens else ids


@pytest.mark.parametrize(("front", "back"), [([], []), ([1], []), ([1, 2], [3]), ([], [3])])
def test_what_begins_every_text_is_told_from_the_text(front: list[int], back: list[int]) -> None:
    tokenizer: Any = Framed(front, back)
    assert encode_text(tokenizer, "ab") == ([97, 98], front)


def test_the_built_in_passage_is_plain_english() -> None:
    assert PASSAGE.isascii()
    assert 400 < len(PASSAGE.split()) < 600
    assert PASSAGE.startswith("It is a truth universally acknowledged, that a single man")
    assert "  " not in PASSAGE


def test_the_passage_is_measured_unless_a_text_is_given(with_tokenizer: Path) -> None:
    found = measure_quality(with_tokenizer, ["none"], max_tokens=50)
    assert (found.tokens, found.tokens_left_out) == (50, len(PASSAGE) - 50)
    assert found.positions == 50  # the first is predicted by <s>
    given = measure_quality(with_tokenizer, ["none"], text=PASSAGE[:50], text_name="mine")
    assert (given.perplexity, given.text) == (found.perplexity, "mine")


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_a_model_without_a_wide_form_is_refused(small: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    assert (
        cli.run(["save-shards", str(small), "--quantization", "fp8_per_channel", "--out", str(saved), "--quiet"]) == 0
    )
    with pytest.raises(OptionError, match="is stored in fp8_per_channel and has no wide form"):
        measure_quality(saved, ["none"], text=IDS)


def test_what_no_measurement_can_use_is_refused(small: Path) -> None:
    for schemes, options, words in (
        ([], {}, "at least one scheme"),
        ("none", {}, "a list"),
        (["none"], {"memory": "1GiB"}, "--memory"),
        (["none"], {"quantization": "none"}, "second argument"),
        (["none"], {"quantize_head": True}, "--quantize-head"),
        (["none"], {"quantization_config": {"default": "mxfp8"}}, "--quantization-config: quality compares"),
        (["none"], {"max_tokens": True}, "--max-tokens"),
    ):
        with pytest.raises(OptionError, match=words):
            measure_quality(small, schemes, text=IDS, **options)
    with pytest.raises(OptionError, match="token id 160 is not in the vocabulary of 160"):
        measure_quality(small, ["none"], text=[1, 160])
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        measure_quality(small, ["none"])


MISTAKES: dict[str, tuple[Sequence[str], str]] = {
    "a scheme that is not known": (("--ids", "1,2,3", "--quantization", "int8_per_channel,fp9"), "'fp9' is not known"),
    "an empty scheme": (("--ids", "1,2,3", "--quantization", "none,"), "'' is not known"),
    "an empty text": (("--text", "{empty}"), "is empty"),
    "a text that is not there": (("--text", "{folder}/none.txt"), "is no file"),
    "a folder for a text": (("--text", "{folder}"), "is a folder"),
    "a text of other bytes": (("--text", "{bytes}"), "is not UTF-8 text (byte 1)"),
    "a text and ids": (("--text", "{empty}", "--ids", "1,2"), "not both"),
    "one id": (("--ids", "7"), "the text is too short: it has 1 token"),
    "no tokenizer": (("--text", "{words}"), "has no tokenizer.json"),
    "no tokens": (("--ids", "1,2,3", "--max-tokens", "0"), "--max-tokens 0"),
    "a picture that cannot be written": (("--ids", "1,2,3", "--plot", "{folder}/plot.png"), "try plot.svg"),
    "a picture in no folder": (("--ids", "1,2,3", "--plot", "{folder}/none/plot.svg"), "does not exist"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str, small: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text(" \n", encoding="utf-8")
    (tmp_path / "bytes").write_bytes(b"a\xff")
    (tmp_path / "words").write_text("some words", encoding="utf-8")
    places = {"folder": tmp_path, "empty": tmp_path / "empty", "bytes": tmp_path / "bytes", "words": tmp_path / "words"}
    arguments, words = MISTAKES[mistake]
    status = cli.run(["quality", str(small), *(argument.format(**places) for argument in arguments)])
    found = capfd.readouterr()
    assert status in (1, 2)
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert words in found.err


# --- what is shown --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(small: Path) -> Quality:
    return measure_quality(small, ["none", "fp8_per_channel", "int8_per_channel"], text=IDS, quantize_head=True)


def test_the_picture_has_a_line_for_each_scheme(measured: Quality, tmp_path: Path) -> None:
    path = tmp_path / "quality.svg"
    write_plot(path, measured)
    root = ElementTree.parse(path).getroot()
    assert titles(root, "weights") == ["fp8_per_channel", "int8_per_channel"]
    assert titles(root, "outputs") == ["fp8_per_channel", "int8_per_channel"]
    assert len(root.findall(f"{SVG}line[@class='total']")) == 2
    points = [len(line.attrib["points"].split()) for line in root.iter(f"{SVG}polyline")]
    assert points == [3, 3, 2, 2]  # the head has no output but the logits
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"none", "fp8_per_channel", "int8_per_channel", "wide", "head"} <= set(texts)


def titles(root: ElementTree.Element, panel: str) -> list[str | None]:
    return [line.findtext(f"{SVG}title") for line in root.findall(f"{SVG}polyline[@class='{panel}']")]


def test_a_picture_without_a_difference_says_so(small: Path) -> None:
    root = ElementTree.fromstring(render_plot(measure_quality(small, ["none"], text=IDS)))
    assert [text.text for text in root.iter(f"{SVG}text")].count("nothing differs") == 2


def test_lines_of_many_schemes_can_be_told_apart() -> None:
    layers = (LayerQuality("layers.0", Noise(1, 100.0, 1.0), Noise(1, 100.0, 1.0)),)
    schemes = tuple(SchemeQuality(f"<{number}>", 1, layers, 0.1, 0.5, 2.0) for number in range(20))
    document = render_plot(Quality("m & m", "llama", "bfloat16", "text", 2, 0, 1, 1, 1, 1.5, schemes))
    lines = list(ElementTree.fromstring(document).iter(f"{SVG}polyline"))
    drawn = {(line.attrib["stroke"], line.attrib.get("stroke-dasharray")) for line in lines}
    assert len(lines) == 40
    assert len(drawn) == 20


def test_tables_hold_totals_and_every_layer(measured: Quality) -> None:
    lines = list(quality_lines(measured))
    rows = {line.split()[0]: line.split() for line in lines[1:5]}
    none, fp8 = measured.schemes[:2]
    assert rows["wide"][-1] == f"{measured.perplexity:.3f}"
    assert rows["none"][3:6] == ["-", "0.000000", "100.00%"]
    assert rows["fp8_per_channel"][3:] == [
        f"{fp8.sqnr_db:.2f}", f"{fp8.kl_divergence:.6f}", f"{fp8.top1_agreement:.2%}", f"{fp8.perplexity:.3f}",
        f"{fp8.perplexity / none.perplexity:.4f}",
    ]  # fmt: skip
    first = fp8.layers[0]
    assert [line.split()[2] for line in lines if line.startswith("layers.0")] == [
        f"{first.weights_db:.2f}", f"{first.outputs_db:.2f}",
    ]  # fmt: skip
    assert sum(line.startswith("head ") for line in lines) == 1


def test_the_command_prints_one_object_and_writes_the_picture(
    with_tokenizer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, plot = tmp_path / "text.txt", tmp_path / "plot.svg"
    text.write_text("What is the sea? Water.", encoding="utf-8")
    options = ["--quantization", "none,fp8_per_tensor", "--text", str(text), "--plot", str(plot), "--json"]
    assert cli.run(["quality", str(with_tokenizer), *options]) == 0
    found = capfd.readouterr()
    result = json.loads(found.out)
    assert found.err == ""
    assert (result["tokens"], result["positions"], result["text"]) == (23, 23, str(text))
    assert [scheme["quantization"] for scheme in result["schemes"]] == ["none", "fp8_per_tensor"]
    assert result["schemes"][0]["layers"][0] == {
        "name": "layers.0", "weights": 0, "sqnr_db": None, "output_sqnr_db": None,
    }  # fmt: skip
    assert result["schemes"][1]["sqnr_db"] > 25.0
    assert ElementTree.parse(plot).getroot().tag == f"{SVG}svg"


def test_every_scheme_is_measured_unless_some_are_named(
    small: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("streaming.commands.quality.scheme_names", lambda: ("none", "int8_per_channel"))
    assert cli.run(["quality", str(small), "--ids", "1,2,3", "--json"]) == 0
    schemes = json.loads(capfd.readouterr().out)["schemes"]
    assert [scheme["quantization"] for scheme in schemes] == ["int8_per_channel"]  # the wide one stands beside it


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_of_a_terminal_that_goes_away() -> None:
    terminal, file, silenced = Terminal(), io.StringIO(), Terminal()
    for stream, enabled in ((terminal, True), (file, True), (silenced, False)):
        progress = Progress(stream, enabled=enabled)
        progress("layers.3", 3, 5)
        progress.close()
    assert terminal.getvalue() == "\r\x1b[K3 of 5 layers measured  layers.3\r\x1b[K"
    assert file.getvalue() == silenced.getvalue() == ""
