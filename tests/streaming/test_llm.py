"""`LLM`, the synchronous face: when it returns, what it says meanwhile, and that it never keeps a program alive."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.write_tiny_model import TinyModel
from streaming import LLM, BudgetError, CheckpointError, LayerState, LoadOptions, OptionError, SamplingParams
from streaming.llm import LoadKeywords
from streaming.prepare import prepare
from tests.streaming.gates import Gate, gated_llm
from tests.streaming.waiting import SOON_S

ROOT = Path(__file__).parents[2]
IDS = [5, 9, 2, 7]
DESIGN_KEYS = {
    "ttft_s", "import_s", "first_layer_ready_s", "first_forward_s", "load_done_s", "bytes_read", "bytes_kept", "load_s",
    "forward_s", "decode_tok_s", "token_ids", "first_token_id", "text", "peak_rss_mb", "peak_rss_bytes",
    "peak_budget_bytes", "stalls", "tokens_per_s",
}  # fmt: skip


def script(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program of a user's own."""
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)


# --- opening --------------------------------------------------------------------------------------------------------


def test_the_constructor_returns_before_any_layer_is_there(four_layers: Path) -> None:
    gate = Gate()
    with gated_llm(four_layers, gate) as llm:
        states = llm.readiness
        assert list(states) == ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
        assert LayerState.READY not in states.values()
        assert llm.shell.get_parameter("model.layers.3.mlp.down_proj.weight").shape == (64, 96)
        gate.open()
        llm.wait_loaded()
        assert set(llm.readiness.values()) == {LayerState.READY}


def test_layers_are_waited_for_by_number_or_name(four_layers: Path) -> None:
    gate = Gate()
    with gated_llm(four_layers, gate) as llm:
        gate.let("layers.0")
        assert llm.wait_ready(0, timeout=SOON_S) is True
        assert llm.wait_ready("layers.0", timeout=0) is True
        assert llm.wait_ready("head", timeout=0.01) is False


@pytest.mark.parametrize("layer", [4, -1, "layers.9", "norm"])
def test_a_layer_that_is_not_there_is_refused_with_those_that_are(four_layers: Path, layer: int | str) -> None:
    with LLM(four_layers) as llm, pytest.raises(OptionError) as caught:
        llm.wait_ready(layer)
    assert str(caught.value) == (f"layer {layer!r} is not one of embed, layers.0, layers.1, layers.2, layers.3, head")


def test_a_tied_models_table_is_part_of_its_head(tiny_folder: Callable[[TinyModel], Path]) -> None:
    with LLM(tiny_folder(TinyModel(tied=True))) as llm:
        assert list(llm.readiness) == ["layers.0", "layers.1", "layers.2", "head"]
        assert len(llm.complete([IDS], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_a_planned_model_can_be_started(four_layers: Path) -> None:
    prepared = prepare(str(four_layers), LoadOptions(dtype="float32"))
    with LLM.start(prepared) as llm:
        assert llm.prepared is prepared
        llm.wait_loaded()
        assert str(llm.shell.dtype) == "torch.float32"


def test_mistakes_are_raised_before_anything_is_read(four_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(prepared: object) -> None:
        raise AssertionError("reading began")

    monkeypatch.setattr("streaming.llm.start_reader", refuse)
    with pytest.raises(OptionError, match="--dtype 'int4'"):
        LLM(four_layers, dtype="int4")
    with pytest.raises(OptionError, match=r"--max-model-len 1000 is more than .* \(512\)"):
        LLM(four_layers, max_model_len=1000)
    with pytest.raises(BudgetError, match="--memory 1000 B is too small"):
        LLM(four_layers, memory=1000)
    with pytest.raises(BudgetError, match="window of 100 bytes is smaller"):
        LLM(four_layers, window=100, dtype="float32")
    with pytest.raises(CheckpointError, match="no such folder or file"):
        LLM(four_layers / "nowhere")
    with pytest.raises(TypeError, match="quantisation"):
        LLM(four_layers, quantisation="none")  # type: ignore[call-arg]


def test_keywords_and_options_are_the_same() -> None:
    assert set(LoadKeywords.__annotations__) == set(LoadOptions.__dataclass_fields__)


def test_options_that_the_memory_just_allows_are_kept_to(four_layers: Path) -> None:
    budget = prepare(str(four_layers), LoadOptions()).budget
    with LLM(four_layers, memory=budget.peak_nbytes) as llm:
        llm.complete([IDS], SamplingParams(max_tokens=3))
        assert llm.stats().peak_budget_bytes <= budget.peak_nbytes
    with LLM(four_layers, memory=budget.peak_nbytes - 1) as llm:  # a byte less, and something is streamed
        assert llm.stats().stream
        assert llm.stats().peak_budget_bytes < budget.peak_nbytes
    with pytest.raises(BudgetError, match="too small even to stream"):
        LLM(four_layers, memory=1000)


# --- accounts -------------------------------------------------------------------------------------------------------


def test_the_summary_holds_every_key_of_the_design(four_layers: Path) -> None:
    with LLM(four_layers) as llm:
        assert set(llm.stats().as_dict()) >= DESIGN_KEYS  # at any time
        (completion,) = llm.complete([IDS], SamplingParams(max_tokens=3, ignore_eos=True))
        llm.wait_loaded()
        found = llm.stats()
    assert found.token_ids == list(completion.token_ids)
    assert found.first_token_id == completion.token_ids[0]
    assert found.finish_reason == "length"
    assert found.peak_rss_bytes > found.bytes_kept
    assert found.peak_rss_mb == pytest.approx(found.peak_rss_bytes / 2**20, abs=0.1)


def test_completions_are_kept_in_the_order_in_which_they_ended(four_layers: Path) -> None:
    with LLM(four_layers) as llm:
        for ids in (IDS, [1], [2, 3]):
            llm.complete([ids], SamplingParams(max_tokens=2))
        assert [list(completion.prompt_ids) for completion in llm.completions] == [IDS, [1], [2, 3]]


def test_a_model_without_a_tokenizer_takes_and_gives_ids(four_layers: Path) -> None:
    with LLM(four_layers) as llm:
        assert llm.has_tokenizer is False
        with pytest.raises(CheckpointError, match="tokenizer"):
            _ = llm.tokenizer
        with pytest.raises(CheckpointError, match="tokenizer"):
            llm.chat_prompt([{"role": "user", "content": "Hello"}])
        assert len(list(llm.pieces([IDS], SamplingParams(max_tokens=3, ignore_eos=True)))) == 3


def test_logits_are_float32_of_every_position(four_layers: Path) -> None:
    with LLM(four_layers) as llm:
        logits = llm.logits(IDS)
    assert (tuple(logits.shape), str(logits.dtype)) == ((4, 160), "torch.float32")


# --- programs -------------------------------------------------------------------------------------------------------

FORGETS = """
import sys
from streaming import LLM, SamplingParams
llm = LLM(sys.argv[1])
print(len(list(llm.pieces([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True)))), flush=True)
"""
FAILS = """
import sys
from streaming import LLM
llm = LLM(sys.argv[1])
raise SystemExit("a mistake of the user's own")
"""
ENDS = """
import sys
from streaming import LLM
with LLM(sys.argv[1]) as llm:
    sys.exit(7)
"""
IMPORTS = """
import sys
import streaming
from streaming import LLM, LayerLoadError, LoadOptions, SamplingParams, open_llm
print(sorted(set(sys.modules) & {"torch", "numpy", "anyio"}))
"""


def test_a_program_that_forgets_to_close_still_ends(four_layers: Path) -> None:
    done = script(FORGETS, four_layers)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_a_program_that_fails_outside_a_block_ends_with_its_own_words(four_layers: Path) -> None:
    done = script(FAILS, four_layers)
    assert (done.returncode, done.stderr) == (1, "a mistake of the user's own\n")


def test_a_program_that_exits_inside_the_block_ends(four_layers: Path) -> None:
    done = script(ENDS, four_layers)
    assert (done.returncode, done.stderr) == (7, "")


def test_importing_the_public_names_imports_nothing_heavy() -> None:
    done = script(IMPORTS)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize("quantization", ["none", "fp8_per_channel"])
@pytest.mark.parametrize("reader", ["process", "threads"])
def test_a_closed_models_weights_go_with_their_last_user(four_layers: Path, reader: str, quantization: str) -> None:
    """And not when the collector of rings comes by."""
    gc.collect()
    gc.disable()
    try:
        llm = LLM(four_layers, reader=reader, quantization=quantization)
        llm.logits([1, 2, 3])
        llm.wait_loaded()
        weights = [weakref.ref(parameter) for parameter in llm.shell.parameters()]
        assert len(weights) > 4 * 6
        llm.close()
        del llm
        assert not [ref for ref in weights if ref() is not None]
    finally:
        gc.enable()


def test_a_single_prompt_in_the_place_of_several_is_named(four_layers: Path) -> None:
    with LLM(four_layers) as llm:
        for wrong in ([5, 6, 7], "The sea"):
            with pytest.raises(OptionError, match=r"a list of prompts is needed, .* \[\[1, 2, 3\]\] is one prompt"):
                llm.complete(wrong, SamplingParams(max_tokens=1))
