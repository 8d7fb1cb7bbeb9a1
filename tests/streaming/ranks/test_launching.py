"""Who starts the ranks, what they are told, and which command lines are refused."""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from layers.topology import Topology
from streaming import cli
from streaming.errors import OptionError, WorkerError
from streaming.options import LoadOptions
from streaming.ranks.channel import decoded, encoded
from streaming.ranks.command_line import follower_status
from streaming.ranks.launch import open_ranks, rank_options
from streaming.ranks.open_message import open_message, opened
from streaming.ranks.torchrun import launched_by
from streaming.sources import Source
from tests.streaming.ranks.processes import running
from tests.streaming.waiting import SOON_S

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "a-run",
}  # fmt: skip


def test_options_make_the_mesh() -> None:
    assert LoadOptions().topology() == Topology()
    assert LoadOptions(tensor_parallel_size=4).topology(3) == Topology(tensor=4, rank=3)
    assert LoadOptions(tensor_parallel_size=2, enable_expert_parallel=True).topology() == Topology(tensor=2, expert=2)
    assert LoadOptions(tensor_parallel_size=2, expert_parallel_size=4, pipeline_parallel_size=2).topology().world == 8
    mapped = LoadOptions(expert_parallel_size=2, expert_map="[[0, 1], [2, 0]]").topology()
    assert mapped.expert_map == ((0, 1), (2, 0))
    assert LoadOptions(expert_parallel_size=2, expert_placement="round_robin").topology().placement == "round_robin"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"tensor_parallel_size": 2, "expert_parallel_size": 3},
            "--tensor-parallel-size and --expert-parallel-size: expert parallel size 3 is no multiple of tensor",
        ),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size 0: a whole number of at least 1 is needed"),
        ({"pipeline_parallel_size": True}, "--pipeline-parallel-size True: a whole number of at least 1 is needed"),
        ({"expert_placement": "spread"}, "--expert-placement 'spread' is not known: choose one of linear, round_robin"),
        ({"expert_map": "[[0],[1]]"}, "--expert-map: the expert map has 2 ranks, not the 1 of this run"),
        (
            {"expert_map": "[[0, 1]]"},
            "--expert-map is for ranks that share the experts: give an --expert-parallel-size",
        ),
        (
            {"expert_placement": "round_robin", "tensor_parallel_size": 2},
            "--expert-placement is for ranks that share the experts: give an --expert-parallel-size too",
        ),
        ({"expert_map": "/dev/zero"}, "--expert-map /dev/zero: is no regular file, which every rank could read"),
        ({"expert_map": "{"}, "--expert-map {: No such file or directory"),
        ({"expert_map": "[0, 1]"}, "--expert-map: rank 0 has 0 where a list of expert numbers is needed"),
        ({"expert_map": [[0], [-1]]}, "--expert-map: rank 1 has -1, which is no expert's number"),
        ({"rank_timeout": 0}, "--rank-timeout 0: seconds are needed, more than 0"),
        ({"rank_timeout": float("nan")}, "--rank-timeout nan: seconds are needed, more than 0"),
        (
            {"rank_timeout": 1e300},
            "--rank-timeout 1e+300: seconds are needed, more than 0 and at most 604,800 (a week)",
        ),
        ({"rank_timeout": "60"}, "--rank-timeout '60': seconds are needed, more than 0"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(given: Mapping[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        LoadOptions(**given)
    assert str(caught.value).startswith(words)


def test_an_expert_map_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text("[[0], [1, 0]]")
    assert LoadOptions(expert_parallel_size=2, expert_map=str(file)).topology().expert_map == ((0,), (1, 0))


def test_options_travel_as_json_and_come_back_the_same() -> None:
    options = LoadOptions(
        tensor_parallel_size=2, expert_parallel_size=4, expert_map=[[0], [1], [2], [3]], quantization="fp8_per_channel",
        sources=(Source(path="more", prefix="vision.", patterns=("*.safetensors",)), Source(path="other")),
        memory="6GiB", seed=3, rank_timeout=2.5,
    )  # fmt: skip
    assert opened(decoded(encoded(open_message("a-model", options)).strip())) == ("a-model", options)


@pytest.mark.parametrize("wrong", [{}, {"options": 3, "model": "m"}, {"options": {"sources": [], "nonsense": 1}}])
def test_a_model_that_cannot_be_understood_is_rank_0s_fault_in_words(wrong: Mapping[str, Any]) -> None:
    with pytest.raises(WorkerError, match=r"^rank 0 sent a model and options that cannot be understood"):
        opened({"kind": "open", **wrong})


def test_an_option_that_is_no_json_is_refused_by_name() -> None:
    options = LoadOptions(model_loader_extra_config={"num_threads": 4}, seed=1)
    object.__setattr__(options, "quantization_config", {"a": object()})
    with pytest.raises(OptionError, match="--quantization-config: holds what JSON does not know"):
        open_message("a-model", options)


def test_the_environment_of_torchrun_is_all_there_or_means_nothing() -> None:
    found = launched_by(TORCHRUN)
    assert found is not None
    assert (found.rank, found.world, found.local_rank, found.local_world) == (1, 2, 1, 2)
    assert (found.host, found.port) == ("127.0.0.1", 29501)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert launched_by({key: value for key, value in TORCHRUN.items() if key != name}) is None
    other = launched_by(TORCHRUN | {"TORCHELASTIC_RUN_ID": "another", "FIRSTLAYER_CONTROL_PORT": "4000"})
    assert other is not None
    assert other.port == 4000
    assert other.token != found.token


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' in the environment: a whole number is needed"),
        ({"RANK": "2"}, "RANK 2 in the environment is none of the 2 ranks of WORLD_SIZE"),
        ({"MASTER_PORT": "65535"}, "port 65536 for the ranks' control channel is none"),
    ],
)
def test_a_wrong_environment_is_named(wrong: Mapping[str, str], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        launched_by({**TORCHRUN, **wrong})
    assert str(caught.value).startswith(words)


def test_one_rank_needs_no_hub() -> None:
    assert open_ranks(LoadOptions(), environ={}) is None


def test_another_number_of_processes_than_ranks_is_refused_with_both() -> None:
    with pytest.raises(OptionError, match="WORLD_SIZE is 2, but the options make 4 ranks"):
        open_ranks(LoadOptions(tensor_parallel_size=4), environ=TORCHRUN | {"RANK": "0"})
    with pytest.raises(OptionError, match="WORLD_SIZE is 2, but the options make 1 rank:"):
        open_ranks(LoadOptions(), environ=TORCHRUN | {"RANK": "0"})


def test_a_model_is_opened_by_rank_0() -> None:
    with pytest.raises(OptionError, match="RANK is 1: a model is opened by rank 0"):
        open_ranks(LoadOptions(tensor_parallel_size=2), environ=TORCHRUN)


def test_a_device_of_its_own_for_each_rank() -> None:
    with pytest.raises(OptionError, match="--device cuda:1 does not go with several ranks"):
        open_ranks(LoadOptions(tensor_parallel_size=2, device="cuda:1"), environ={})
    options = LoadOptions(tensor_parallel_size=2, device="cuda", threads=3)
    assert rank_options(options, rank=1, environ={}) == LoadOptions(tensor_parallel_size=2, device="cuda:1", threads=3)
    assert rank_options(options, rank=9, environ=TORCHRUN | {"LOCAL_RANK": "0"}).device == "cuda:0"
    assert rank_options(LoadOptions(device="cuda"), rank=0, environ={}) == LoadOptions(device="cuda")


def test_cores_are_shared_by_the_ranks_of_a_machine() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert rank_options(LoadOptions(tensor_parallel_size=2), rank=0, environ={}).threads == max(1, cores // 2)
    assert rank_options(LoadOptions(tensor_parallel_size=4096), rank=0, environ={}).threads == 1


def test_a_control_port_in_use_is_named_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(OptionError) as caught:
            open_ranks(
                LoadOptions(tensor_parallel_size=2),
                environ=TORCHRUN | {"RANK": "0", "FIRSTLAYER_CONTROL_PORT": port},
            )
    assert str(caught.value).startswith(f"port {port} for the ranks' control channel: Address already in use")
    assert "FIRSTLAYER_CONTROL_PORT" in str(caught.value)


def test_too_few_files_for_the_ranks_are_named_before_any_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (40, 4096))
    with pytest.raises(WorkerError, match=r"^3 ranks may need 58 open files and connections, this process may have 40"):
        open_ranks(LoadOptions(tensor_parallel_size=3), environ=dict(os.environ), program=("/no-such-program",))


def test_a_follower_that_cannot_be_started_leaves_nobody_behind() -> None:
    with pytest.raises(WorkerError, match=r"rank 1 of 3 cannot be started: .*no-such-program"):
        open_ranks(LoadOptions(tensor_parallel_size=3), environ=dict(os.environ), program=("/no-such-program",))


def test_a_follower_that_cannot_open_the_model_says_so_everywhere(capfd: pytest.CaptureFixture[str]) -> None:
    options = LoadOptions(tensor_parallel_size=2)
    hub = open_ranks(options)
    assert hub is not None
    with hub:
        hub.broadcast(open_message("/no-such-folder", options))
        failure = hub.wait_failure(SOON_S)
    words = "/no-such-folder: no such folder"
    assert str(failure).startswith(f"rank 1, stage plan: {words}")
    assert capfd.readouterr().err.startswith(f"firstlayer rank 1: error: {words}")


def test_the_same_command_line_becomes_a_follower_under_torchrun(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        environ = {**TORCHRUN, "FIRSTLAYER_CONTROL_PORT": str(free.getsockname()[1])}
    options = LoadOptions(tensor_parallel_size=2)
    command = ("-m", "streaming", "generate", "/no-such-folder", "--ids", "1", "--tensor-parallel-size", "2")
    with running(command, tmp_path, environ=environ) as run:  # comes before anybody listens
        hub = open_ranks(options, environ=environ | {"RANK": "0"})
        assert hub is not None
        with hub:
            hub.broadcast(open_message("/no-such-folder", options))
            assert str(hub.wait_failure(SOON_S)).startswith("rank 1, stage plan: /no-such-folder: no such folder")
            assert run.wait() == 1
        assert run.stderr.startswith("firstlayer rank 1: error: /no-such-folder: no such folder")
        assert run.stdout == ""


def test_the_token_is_not_on_the_command_line(tmp_path: Path) -> None:
    with running(("-m", "tests.streaming.ranks.stand_in", "lead", "2", "8"), tmp_path) as run:
        pid = run.await_rank(1)
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        token = next(
            field.partition(b"=")[2]
            for field in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if field.startswith(b"FIRSTLAYER_RANK_TOKEN=")
        )
        assert len(token) == 32
        assert token not in words


def namespace(*arguments: str) -> argparse.Namespace:
    return cli.make_parser(arguments[0]).parse_args(arguments)


@pytest.mark.parametrize("command", ["verify", "quantize", "quality"])
def test_commands_that_know_no_ranks_say_so(command: str) -> None:
    given = namespace("plan", "m", "--tensor-parallel-size", "2")
    given.command = command
    with pytest.raises(OptionError) as caught:
        follower_status(given, environ={})
    assert str(caught.value) == (
        f"{command} runs on one rank, the options make 2: several go with generate, chat, logits, bench, "
        "plan, inspect and save-shards"
    )


def test_the_command_line_refuses_ranks_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "streaming", "verify", "demo", "--tensor-parallel-size", "2"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "firstlayer verify: error: verify runs on one rank, the options make 2: several go with generate, chat, "
        "logits, bench, plan, inspect and save-shards\n"
    )


def test_what_torchrun_starts_beside_rank_0() -> None:
    generate = namespace("generate", "m", "--ids", "1", "--tensor-parallel-size", "2")
    assert follower_status(generate, environ={}) is None
    assert follower_status(generate, environ=TORCHRUN | {"RANK": "0"}) is None
    plan = namespace("plan", "m", "--tensor-parallel-size", "2")
    assert follower_status(plan, environ=TORCHRUN) == 0  # every rank is seen from headers: one process shows them all
    assert follower_status(plan, environ=TORCHRUN | {"RANK": "0"}) is None
    with pytest.raises(OptionError, match="WORLD_SIZE is 2, but the options make 1 rank:"):
        follower_status(namespace("generate", "m", "--ids", "1"), environ=TORCHRUN)
    with pytest.raises(OptionError, match="bench starts the ranks of each run itself"):
        follower_status(namespace("bench", "m", "--tensor-parallel-size", "2"), environ=TORCHRUN)


def test_a_follower_of_torchrun_whose_rank_0_never_comes_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = ["generate", "demo", "--ids", "1", "--tensor-parallel-size", "2", "--rank-timeout", "0.3"]
    done = subprocess.run(
        [sys.executable, "-m", "streaming", *command],
        env={**os.environ, **TORCHRUN, "FIRSTLAYER_CONTROL_PORT": port},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("firstlayer rank 1: error: rank 0: could not be joined at 127.0.0.1 port ")
    assert done.stderr.count("\n") == 1
