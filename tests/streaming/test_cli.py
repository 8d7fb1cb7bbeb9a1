"""The command line: exit statuses, one line for a mistake, one line of JSON, and an end when it is asked for."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from quant.registry import scheme_names
from streaming import cli
from streaming.stages import store_item
from tests.streaming.resident import resident_model, run_resident
from tests.streaming.test_llm import DESIGN_KEYS
from tests.streaming.waiting import SOON_S

ROOT = Path(__file__).parents[2]
IDS = "5,9,2,7"


@dataclass(frozen=True)
class Outcome:
    """What a run of the command line left."""

    status: int
    out: str
    err: str


@pytest.fixture
def firstlayer(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """The command line in this process."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # put back behind the test

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        alarm = signal.getsignal(signal.SIGALRM)
        try:
            status = cli.run([str(argument) for argument in arguments])
        except SystemExit as ended:
            status = int(ended.code or 0)
        except KeyboardInterrupt:
            status = -signal.SIGINT
        finally:
            signal.signal(signal.SIGALRM, alarm)  # the command line may use it, and so does the limit of time
        return Outcome(status, *capfd.readouterr())

    return run


def process(*arguments: object, **how: Any) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "streaming", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


# --- mistakes -------------------------------------------------------------------------------------------------------

MISTAKES = {
    "an option that is not there": (("generate", "{model}", "--ids", IDS, "--sideways"), 2, "--sideways"),
    "a command that is not there": (("conjure", "{model}"), 2, "conjure"),
    "no command": ((), 2, "COMMAND"),
    "no model": (("generate",), 2, "MODEL"),
    "a scheme that is not there": (("generate", "{model}", "--ids", IDS, "--quantization", "fp9"), 2, "'fp9'"),
    "a dtype that is not there": (("plan", "{model}", "--dtype", "int3"), 2, "'int3'"),
    "a strategy that is not there": (("plan", "{model}", "--safetensors-load-strategy", "mmap"), 2, "'mmap'"),
    "a format that is not there": (("plan", "{model}", "--load-format", "zip"), 2, "zip"),
    "a size that is none": (("plan", "{model}", "--memory", "lots"), 2, "--memory 'lots'"),
    "a number that is none": (("generate", "{model}", "--ids", IDS, "--max-tokens", "many"), 2, "--max-tokens"),
    "no tokens": (("generate", "{model}", "--ids", IDS, "--max-tokens", "0"), 2, "max_tokens is 0"),
    "a temperature below zero": (("generate", "{model}", "--ids", IDS, "--temperature", "-1"), 2, "temperature"),
    "no prompt": (("generate", "{model}"), 2, "--prompt TEXT, --prompt-file FILE, --ids 1,2,3 or --prompts FILE"),
    "ids that are none": (("generate", "{model}", "--ids", "1,two"), 2, "--ids '1,two'"),
    "an id beyond the vocabulary": (("generate", "{model}", "--ids", "1,160"), 2, "token id 160"),
    "a chat of ids": (("generate", "{model}", "--ids", IDS, "--chat"), 2, "--chat takes text"),
    "a trace in no folder": (("generate", "{model}", "--ids", IDS, "--trace", "/no/where/t.json"), 2, "/no/where"),
    "a timeline that is no svg": (("generate", "{model}", "--ids", IDS, "--timeline", "t.png"), 2, "t.png"),
    "a context beyond the model's": (("generate", "{model}", "--ids", IDS, "--max-model-len", "999"), 2, "(512)"),
    "a trace that is a folder": (("generate", "{model}", "--ids", IDS, "--trace", "{empty}"), 2, "is a folder"),
    "a timeline that is a folder": (("generate", "{model}", "--ids", IDS, "--timeline", "."), 2, "is a folder"),
    "logits into a folder": (("logits", "{model}", "--ids", IDS, "--out", "{empty}"), 2, "is a folder"),
    "an option misspelled": (("plan", "{model}", "--quantisation", "none"), 2,
                             "plan: error: unrecognized arguments: --quantisation none; is --quantization meant?"),
    "an empty configuration": (("plan", "{model}", "--quantization-config", ""), 2, "--quantization-config is empty"),
    "an option cut short": (("plan", "{model}", "--quantiz", "none"), 2, "--quantiz"),
    "a source without a path": (("plan", "{model}", "--source", "=x."), 2, "--source: a path or a hub id is needed"),
    "a source's empty pattern": (("plan", "{model}", "--source", "b=x.,"), 2, "patterns are names of files"),
    "a chat without a tokenizer": (("chat", "{model}"), 1, "has no tokenizer.json"),
    "an output in no folder": (("logits", "{model}", "--ids", IDS, "--out", "/no/where/x.npy"), 2, "/no/where"),
    "a layer that is not there": (("inspect", "{model}", "--layer", "7"), 2, "'7' is not one of layers.0"),
    "a size of the head alone": (("plan", "{model}", "--quantize-head"), 2, "--quantize-head needs"),
    "what only a run of bench finds": (("bench", "{model}", "--state", "warm", "--device", "cuda:77"), 2,
                                       "bench: error: --device cuda:77"),
    "no rounds": (("bench", "{model}", "--rounds", "0"), 2, "--rounds 0"),
    "a chat in json": (("chat", "{model}", "--json"), 2, "chat has no --json"),
    "a model that is nowhere": (("generate", "/no/such/model", "--ids", IDS), 1, "/no/such/model"),
    "a model that is not in the cache": (("plan", "nobody/nothing"), 1, "nobody/nothing"),
    "a folder without a model": (("generate", "{empty}", "--ids", IDS), 1, "{empty}"),
    "too little memory": (("plan", "{model}", "--memory", "10KiB"), 1, "--memory 10.0 KiB is too small"),
    "too small a window": (("plan", "{model}", "--dtype", "float32", "--window", "1KiB"), 1, "1,024 bytes"),
    "a prompt file that is not there": (("generate", "{model}", "--prompt-file", "/no/p.txt"), 1, "/no/p.txt"),
    "a prompt file that is no text": (("generate", "{model}", "--prompt-file", "{binary}"), 2, "{binary}"),
    "a text without a tokenizer": (("generate", "{model}", "--prompt", "Hello"), 1, "tokenizer"),
}  # fmt: skip


@pytest.fixture
def places(four_layers: Path, tmp_path: Path) -> Mapping[str, Path]:
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    return {"{model}": four_layers, "{empty}": tmp_path / "empty", "{binary}": tmp_path / "binary.txt"}


def filled(text: str, places: Mapping[str, Path]) -> str:
    for name, path in places.items():
        text = text.replace(name, str(path))
    return text


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_clear_line_and_a_status(
    case: str, firstlayer: Callable[..., Outcome], places: Mapping[str, Path]
) -> None:
    arguments, status, words = MISTAKES[case]
    done = firstlayer(*(filled(argument, places) for argument in arguments))
    assert (done.status, done.out) == (status, "")
    assert len(done.err.splitlines()) == 1, done.err
    assert "error: " in done.err
    assert filled(words, places) in done.err


def test_all_problems_of_a_checkpoint_are_listed(
    firstlayer: Callable[..., Outcome], four_layers: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(four_layers, tmp_path / "broken"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    done = firstlayer("plan", folder)
    assert (done.status, done.out) == (1, "")
    lines = done.err.splitlines()
    assert lines[0].endswith("9 problems in the checkpoint")
    assert len(lines) == 10
    assert all(line.startswith("  model.layers.4.") and "is missing" in line for line in lines[1:])


def test_a_traceback_only_with_debug(firstlayer: Callable[..., Outcome]) -> None:
    assert "Traceback" not in firstlayer("plan", "/no/such/model").err
    done = process("plan", "/no/such/model", "--debug")
    out, err = done.communicate(timeout=SOON_S)
    assert (done.returncode, out) == (1, "")
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("firstlayer plan: error: /no/such/model")


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_is_there_for_every_command(command: str, firstlayer: Callable[..., Outcome]) -> None:
    done = firstlayer(*command.split(), "--help")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(f"usage: firstlayer {command}".rstrip())


def test_the_version_is_that_of_the_package(firstlayer: Callable[..., Outcome]) -> None:
    done = firstlayer("--version")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("firstlayer ")


# --- json -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", scheme_names())
def test_json_is_one_line_with_every_key_and_nothing_else(
    quantization: str, firstlayer: Callable[..., Outcome], four_layers: Path
) -> None:
    done = firstlayer("generate", four_layers, "--ids", IDS, "--max-tokens", 3, "--ignore-eos", "--json",
                      "--quantization", quantization)  # fmt: skip
    assert (done.status, done.err) == (0, "")
    (line,) = done.out.splitlines()
    found = json.loads(line)
    assert set(found) >= DESIGN_KEYS
    seconds = ("ttft_s", "import_s", "first_layer_ready_s", "first_forward_s", "load_done_s", "load_s", "forward_s")
    assert all(isinstance(found[key], float) and found[key] > 0 for key in seconds)
    expected = int(
        run_resident(resident_model(four_layers, quantization=quantization), [5, 9, 2, 7]).logits[-1].argmax()
    )
    assert found["first_token_id"] == found["token_ids"][0] == expected
    assert len(found["token_ids"]) == 3
    assert (found["text"], found["finish_reason"]) == (None, "length")


def test_several_prompts_are_all_in_the_json(firstlayer: Callable[..., Outcome], four_layers: Path) -> None:
    done = firstlayer(
        "generate", four_layers, "--ids", "1,2", "--ids", "3", "--max-tokens", 2, "--ignore-eos", "--json"
    )
    completions = json.loads(done.out)["completions"]
    assert [completion["index"] for completion in completions] == [0, 1]
    assert [len(completion["token_ids"]) for completion in completions] == [2, 2]


def test_warnings_are_lines_of_their_own_on_stderr(
    firstlayer: Callable[..., Outcome], tiny_folder: Callable[[TinyModel], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder(TinyModel(dtype="float32")), tmp_path / "wide"))
    for flags in (("--json",), ("--quiet",), ()):
        done = firstlayer("generate", folder, "--ids", IDS, "--max-tokens", 1, "--dtype", "bfloat16", *flags)
        assert done.status == 0
        assert done.err.splitlines()[0].startswith("warning: 30 tensors stored in float32 become bfloat16")
        assert len(done.err.splitlines()) == 1 or not flags


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_plan_and_inspect_speak_json(command: str, firstlayer: Callable[..., Outcome], four_layers: Path) -> None:
    done = firstlayer(command, four_layers, "--json")
    assert (done.status, done.err) == (0, "")
    (line,) = done.out.splitlines()
    names = [layer["name"] for layer in json.loads(line)["layers"]]
    assert names == ["layers.0", "layers.1", "layers.2", "layers.3", "head", "embed"]


# --- what the commands do -------------------------------------------------------------------------------------------


def test_generate_prints_ids_where_there_is_no_tokenizer(firstlayer: Callable[..., Outcome], four_layers: Path) -> None:
    found = json.loads(
        firstlayer("generate", four_layers, "--ids", IDS, "--max-tokens", 4, "--ignore-eos", "--json").out
    )
    done = firstlayer("generate", four_layers, "--ids", IDS, "--max-tokens", 4, "--ignore-eos", "--quiet")
    assert (done.status, done.err) == (0, "")
    assert done.out.split() == [str(token) for token in found["token_ids"]]


def test_generate_ends_with_a_summary_on_stderr(firstlayer: Callable[..., Outcome], four_layers: Path) -> None:
    done = firstlayer("generate", four_layers, "--ids", IDS, "--max-tokens", 4, "--ignore-eos")
    assert done.status == 0
    for word in (
        "first token",
        "first layer",
        "load done",
        "read with    direct: local files",
        "stalls",
        "memory",
        "4 tokens, ended by length",
    ):
        assert word in done.err


def test_generate_leaves_the_files_that_were_asked_for(
    firstlayer: Callable[..., Outcome], four_layers: Path, tmp_path: Path
) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.svg"
    done = firstlayer("generate", four_layers, "--ids", IDS, "--max-tokens", 2, "--quiet", "--trace", trace,
                      "--timeline", picture)  # fmt: skip
    assert done.status == 0
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"layers.0", "layers.3", "model.layers.2.mlp.down_proj.weight"} <= names
    assert picture.read_text().startswith("<svg")


def test_logits_are_those_of_the_resident_model(
    firstlayer: Callable[..., Outcome], four_layers: Path, tmp_path: Path
) -> None:
    out = tmp_path / "logits.bin"
    done = firstlayer("logits", four_layers, "--ids", IDS, "--out", out, "--json")
    expected = run_resident(resident_model(four_layers), [5, 9, 2, 7]).logits
    found = np.load(out)
    assert found.dtype == np.float32
    assert torch.equal(torch.from_numpy(found), expected)
    assert json.loads(done.out) == {"out": str(out), "shape": [4, 160], "argmax_last": int(expected[-1].argmax())}


@pytest.mark.parametrize("quantization", scheme_names())
def test_verify_finds_no_difference(quantization: str, firstlayer: Callable[..., Outcome], four_layers: Path) -> None:
    done = firstlayer("verify", four_layers, "--quantization", quantization, "--json")
    found = json.loads(done.out)
    assert (done.status, found["equal"], found["differences"]) == (0, True, [])
    assert found["layer_outputs"] == 2 * 4
    assert found["logits"] == 2 * 32 * 160


def test_verify_finds_a_difference(
    firstlayer: Callable[..., Outcome], four_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.2.self_attn.o_proj.weight"

    def store_wrong(item: Any, wide: torch.Tensor, views: Any) -> None:
        store_item(item, wide * 2 if item.tensor.name == name else wide, views)

    monkeypatch.setattr("streaming.item_storing.store_item", store_wrong)
    done = firstlayer("verify", four_layers, "--dtype", "float32", "--json")
    found = json.loads(done.out)
    assert (done.status, found["equal"]) == (1, False)
    assert any(difference.startswith(f"{name}: ") for difference in found["differences"])


def test_plan_is_a_table_with_a_line_for_each_layer(firstlayer: Callable[..., Outcome], four_layers: Path) -> None:
    done = firstlayer("plan", four_layers, "--bandwidth", "1MB")
    lines = done.out.splitlines()
    assert (done.status, done.err) == (0, "")
    assert lines[0].startswith(f"{four_layers}: llama, 4 layers, bfloat16, quantization none, 0 tensors not used")
    assert [line.split()[0] for line in lines[2:9]] == [
        "layers.0", "layers.1", "layers.2", "layers.3", "head", "embed", "total",
    ]  # fmt: skip
    assert "281.1 KiB" in lines[8]  # 4 x 61,696 + 20,608 + 20,480 bytes
    assert "0.29 s at" in lines[-1]


def test_inspect_says_what_feeds_each_parameter(firstlayer: Callable[..., Outcome], four_layers: Path) -> None:
    done = firstlayer("inspect", four_layers, "--layer", "1")
    assert done.status == 0
    assert "  model.layers.1.self_attn.qkv_proj.weight [none] weight BF16 [128, 64]" in done.out
    assert "    <- model.layers.1.self_attn.k_proj.weight BF16 [32, 64] rows 0 to 32 as part 'k'" in done.out
    assert "layers.0" not in done.out


def test_bench_measures_in_processes_of_their_own(firstlayer: Callable[..., Outcome], four_layers: Path) -> None:
    done = firstlayer("bench", four_layers, "--state", "warm", "--json")
    found = json.loads(done.out)
    assert done.status == 0
    assert found["warm"]["ttft_s"] > found["warm"]["from_load_s"] > 0
    assert found["warm"]["floor_s"] > 0
    assert len(found["rounds"]) == 1
    assert (found["warm"]["load_format"], found["warm"]["read_strategy"]) == ("safetensors", "direct")


def test_bench_of_made_up_weights_has_no_floor(firstlayer: Callable[..., Outcome], four_layers: Path) -> None:
    done = firstlayer("bench", four_layers, "--state", "warm", "--load-format", "dummy")
    lines = done.out.splitlines()
    assert (done.status, lines[2]) == (0, "dummy, read with dummy: no file is read")
    assert [word == "-" for word in lines[1].split()] == [False, True, False, True, False, True]


def test_bench_hands_every_source_to_its_processes(
    firstlayer: Callable[..., Outcome], tiny_folder: Callable[[TinyModel], Path], tmp_path: Path
) -> None:
    first = Path(shutil.copytree(tiny_folder(TinyModel(layers=2, files=1)), tmp_path / "first"))
    tensors = load_file(first / "model.safetensors")
    (tmp_path / "second").mkdir()
    save_file({"weight": tensors.pop("lm_head.weight")}, tmp_path / "second" / "model.safetensors")
    save_file(tensors, first / "model.safetensors")
    done = firstlayer("bench", first, "--state", "warm", "--source", f"{tmp_path / 'second'}=lm_head.", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["rounds"][0]["bytes_read"] == sum(t.nbytes for t in tensors.values()) + 160 * 64 * 2


# --- processes ------------------------------------------------------------------------------------------------------

LIGHT = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "anyio", "transformers", "tokenizers"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, Refuse())
from streaming.cli import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["plan", "inspect"])
@pytest.mark.parametrize("quantization", scheme_names())
def test_planning_imports_nothing_heavy(command: str, quantization: str, four_layers: Path) -> None:
    arguments = [sys.executable, "-c", LIGHT, command, str(four_layers), "--quantization", quantization]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=SOON_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "layers.3" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("plan",), ("inspect",), ("generate", "--ids", IDS, "--quiet"), ("plan", "--json")], ids=" ".join
)
def test_nobody_reading_the_output_is_no_traceback(arguments: tuple[str, ...], four_layers: Path) -> None:
    """As in `firstlayer plan MODEL | true`."""
    receive, send = os.pipe()
    os.close(receive)
    done = process(arguments[0], four_layers, *arguments[1:], stdout=send)
    os.close(send)
    _, err = done.communicate(timeout=SOON_S)
    assert (done.returncode, err) == (1, "")


def test_a_reader_that_goes_away_in_the_middle_is_no_traceback(four_layers: Path) -> None:
    """As in `firstlayer generate MODEL ... | head -c 1`."""
    with process("generate", four_layers, "--ids", IDS, "--max-tokens", 400, "--ignore-eos", "--quiet") as done:
        assert done.stdout is not None
        assert done.stderr is not None
        assert done.stdout.read(1)
        done.stdout.close()
        assert done.wait(SOON_S) == 1
        assert done.stderr.read() == ""


HALTED = """
import os, signal, sys
import streaming.llm
from streaming.cli import run
from streaming.reader import ProcessReader

def say_now():
    print(*pids, file=sys.stderr, flush=True)

pids = []

def halted(prepared):
    reader = ProcessReader(prepared.read_plan)
    os.kill(reader.pid, signal.SIGSTOP)
    pids.append(reader.pid)
    return reader

streaming.llm.start_reader = halted
%s
sys.exit(run(sys.argv[1:]))
"""
MOMENTS = {
    "while torch is imported": """
bring_torch = streaming.llm.bring_torch

def told(*arguments, **keywords):
    say_now()
    bring_torch(*arguments, **keywords)

streaming.llm.bring_torch = told
""",
    "while the first layer is awaited": """
from streaming.model import StreamedModel
submit = StreamedModel.submit

def told(*arguments, **keywords):
    job = submit(*arguments, **keywords)
    say_now()
    return job

StreamedModel.submit = told
""",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_while_loading_ends_with_one_line_and_no_child(moment: str, four_layers: Path) -> None:
    """The reader's process is halted: the load cannot end by itself, nor can the reader."""
    command = [sys.executable, "-c", HALTED % MOMENTS[moment], "generate", str(four_layers), "--ids", IDS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as done:
        assert done.stderr is not None
        watched = os.pidfd_open(int(done.stderr.readline()))
        try:
            done.send_signal(signal.SIGINT)
            assert done.wait(SOON_S) == 1
            assert select.select([watched], [], [], SOON_S)[0] == [watched]  # readable: it has ended
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(watched, signal.SIGKILL)
            os.close(watched)
        out, err = done.communicate(timeout=SOON_S)
    assert (out, err.splitlines()) == ("", ["firstlayer generate: error: interrupted"])


INTERRUPTED = """
import os, signal, sys
import streaming.llm
from streaming.cli import run
%s
sys.exit(run(sys.argv[1:]))
"""
UNKIND_MOMENTS = {
    "in a destructor while torch is imported": """
class Destroyed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

import_torch = streaming.llm.import_torch

def interrupted(*arguments, **keywords):
    Destroyed()
    import_torch(*arguments, **keywords)

streaming.llm.import_torch = interrupted
""",
    "in code that catches everything while torch is imported": """
import_torch = streaming.llm.import_torch

def interrupted(*arguments, **keywords):
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        pass
    import_torch(*arguments, **keywords)

streaming.llm.import_torch = interrupted
""",
    "while another thread builds the shell": """
import streaming.model_run
build_shell = streaming.model_run.build_shell

def interrupted(*arguments, **keywords):
    os.kill(os.getpid(), signal.SIGINT)
    return build_shell(*arguments, **keywords)

streaming.model_run.build_shell = interrupted
""",
}


@pytest.mark.parametrize("moment", UNKIND_MOMENTS)
def test_ctrl_c_at_an_unkind_moment_ends_the_run_all_the_same(moment: str, four_layers: Path) -> None:
    """Imports lose what destructors raise, and what their own code catches (torch's does, in one run of ten); a model
    half open must not keep the process alive."""
    command = [sys.executable, "-c", INTERRUPTED % UNKIND_MOMENTS[moment], "generate", str(four_layers), "--ids", IDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "firstlayer generate: error: interrupted"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["quantize", "quality"])
def test_ctrl_c_while_torch_is_imported_for_a_walk_over_the_layers_ends_it(
    command: str, four_layers: Path, tmp_path: Path
) -> None:
    moment = UNKIND_MOMENTS["in code that catches everything while torch is imported"]
    home = {"quantize": "streaming.commands.quantize", "quality": "streaming.quality"}[command]
    rest = {"quantize": (tmp_path / "out", "--quantization", "mxfp8"), "quality": ("--ids", IDS)}[command]
    program = INTERRUPTED % f"import {home}\n{moment.replace('streaming.llm', home)}"
    arguments = (sys.executable, "-c", program, command, four_layers, *rest)
    done = subprocess.run([*map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [f"firstlayer {command}: error: interrupted"]
    assert not (tmp_path / "out").exists()


def test_ctrl_c_before_the_command_is_known_is_one_line(
    firstlayer: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*ignored: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "make_parser", interrupt)
    done = firstlayer("plan", "somewhere")
    assert (done.status, done.out) == (1, "")
    assert done.err.splitlines()[-1].endswith("error: interrupted")


EARLY = """
import sys
from importlib.abc import MetaPathFinder

class Interrupt(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "streaming.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
from streaming.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_before_the_command_line_is_imported_is_one_line() -> None:
    command = [sys.executable, "-c", EARLY, "plan", "somewhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SOON_S, check=False)
    assert done.returncode != 0
    assert (done.stdout, done.stderr.splitlines()) == ("", ["firstlayer: error: interrupted"])
