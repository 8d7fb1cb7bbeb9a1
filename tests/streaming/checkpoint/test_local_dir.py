"""`firstlayer download` into a plain folder, and hub ids that name a GGUF model by its quantization."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import save

from streaming import cli
from streaming.checkpoint.hub import HubId, parse_hub_id
from streaming.checkpoint.hub_folder import WORK, fetch_files
from streaming.checkpoint.location import locate
from streaming.checkpoint.wanted_files import quantized_file
from streaming.errors import CheckpointError
from tests.streaming.checkpoint.build import array
from tests.streaming.checkpoint.conftest import SMALL
from tests.streaming.checkpoint.hub_server import OLDER, Hub

ROOT = Path(__file__).parents[3]
WEIGHTS = save({"x": array(64, 64)})
FILES = {**SMALL, "model.safetensors": WEIGHTS}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def firstlayer(hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line in this process: exit status, stdout, stderr. The server has acme/tiny."""
    hub.add("acme/tiny", {**FILES, "README.md": b"#"}, older={**FILES, "model.safetensors": save({"x": array(8, 8)})})

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = cli.run(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        return (status, *capsys.readouterr())

    return run


def contents(folder: Path) -> dict[str, bytes]:
    """What has a final name."""
    files = [path for path in folder.rglob("*") if path.is_file() and WORK not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_files_lie_in_the_folder_and_the_cache_stays_as_it_was(
    firstlayer: Run, hub: Hub, cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "models"
    assert firstlayer("download", "acme/tiny", "--local-dir", str(folder)) == (0, f"{folder}\n", "")
    assert contents(folder) == FILES
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert not list(cache.rglob("model.safetensors"))
    status, out, _ = firstlayer("inspect", "--files", "--json", str(folder))
    assert (status, json.loads(out)["tensors"]) == (0, 1)


def test_what_is_there_is_not_fetched_again_and_what_changed_is(firstlayer: Run, hub: Hub, tmp_path: Path) -> None:
    into = ("--local-dir", str(tmp_path / "m"), "--json")
    assert json.loads(firstlayer("download", "acme/tiny", *into)[1])["bytes_fetched"] == sum(map(len, FILES.values()))
    hub.requests.clear()
    found = json.loads(firstlayer("download", "acme/tiny", *into)[1])
    assert found["bytes_fetched"] == 0
    assert found["files"] == {name: len(data) for name, data in sorted(FILES.items())}
    assert hub.fetched() == []
    assert firstlayer("download", "acme/tiny@v1", *into)[0] == 0
    assert hub.fetched() == ["model.safetensors"]
    assert contents(tmp_path / "m") == hub.repos["acme/tiny"].commits[OLDER]


def test_a_file_that_was_put_there_is_kept_if_it_is_the_hubs_and_replaced_if_not(
    firstlayer: Run, hub: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    (folder / "config.json").write_bytes(b"x" * len(SMALL["config.json"]))  # of the right size, and another file
    assert firstlayer("download", "acme/tiny", "--local-dir", str(folder))[0] == 0
    assert hub.fetched() == ["config.json", "tokenizer.json"]
    assert contents(folder) == FILES


def test_an_ended_run_leaves_no_half_file_and_the_next_one_goes_on_with_it(
    firstlayer: Run, hub: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "m"
    hub.stalls["model.safetensors"] = 5000
    process = subprocess.Popen(
        [sys.executable, "-m", "streaming", "download", "acme/tiny", "--local-dir", str(folder)],
        cwd=ROOT, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert hub.stalled.wait(60)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (1, "", "firstlayer download: error: interrupted\n")
    assert "model.safetensors" not in contents(folder)
    (partial,) = (folder / WORK).rglob("*.partial")
    partial.write_bytes(WEIGHTS[:3000])  # whatever of the 5000 bytes it had kept
    hub.requests.clear()
    assert firstlayer("download", "acme/tiny", "--local-dir", str(folder))[0] == 0
    assert hub.ranges("model.safetensors") == ["bytes=3000-"]
    assert contents(folder) == FILES
    assert not list((folder / WORK).rglob("*.partial"))


@pytest.mark.parametrize("name", ["../outside.json", "/etc/outside.json", f"{WORK}/notes.json"])
def test_a_name_that_leads_out_of_the_folder_is_refused(firstlayer: Run, hub: Hub, tmp_path: Path, name: str) -> None:
    index = json.dumps({"weight_map": {"x": name}}).encode()
    hub.add("acme/evil", {**SMALL, "model.safetensors.index.json": index, "model.safetensors": WEIGHTS, name: b"{}"})
    status, out, said = firstlayer("download", f"acme/evil/{name}.gguf", "--local-dir", str(tmp_path / "m"))
    assert (status, out, said.count("\n")) == (1, "", 1)
    firstlayer("download", "acme/evil", "--local-dir", str(tmp_path / "m"))
    assert not (tmp_path / "outside.json").exists()


@pytest.mark.parametrize(
    ("arguments", "variables", "status", "words"),
    [
        (["--local-dir", "{file}"], {}, 2, "is a file; the name of a folder is needed"),
        (["--local-dir", "{file}/below"], {}, 1, "Not a directory"),
        (["--local-dir", "{tmp}/m"], {"HF_HUB_OFFLINE": "1"}, 1, "HF_HUB_OFFLINE forbids"),
        (["--local-dir", "{tmp}/m"], {"FIRSTLAYER_USE_MODELSCOPE": "1"}, 2, "goes with the Hugging Face hub"),
        (["--local-dir", "{tmp}/m", "--revision", "no"], {}, 1, "it has no such branch, tag or commit"),
    ],
)
def test_mistakes_are_one_line(
    firstlayer: Run, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], variables: dict[str, str], status: int, words: str,
) -> None:  # fmt: skip
    (tmp_path / "file").write_bytes(b"")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    given = [argument.format(file=tmp_path / "file", tmp=tmp_path) for argument in arguments]
    found = firstlayer("download", "acme/tiny", *given)
    assert found[:2] == (status, "")
    assert words in found[2]
    assert found[2].count("\n") == 1
    assert hub.fetched() == []


# --- owner/name:QUANTIZATION ----------------------------------------------------------------------------------------

QUANTS = [
    "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.Q8_0.gguf", "m-IQ4_XS.gguf", "mmproj-Q8_0.gguf", "m-BF16-00001-of-00002.gguf",
    "m-BF16-00002-of-00002.gguf", "Q2_K/m-00001-of-00002.gguf", "Q2_K/m-00002-of-00002.gguf", "m-UD-Q3_K_XL.gguf",
    "m-Q3_K_XL.gguf", "m.imatrix.gguf", "README.md",
]  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "file"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"), ("q4_k_m", "m-Q4_K_M.gguf"), ("Q8_0", "m.Q8_0.gguf"), ("IQ4_XS", "m-IQ4_XS.gguf"),
        ("BF16", "m-BF16-00001-of-00002.gguf"), ("Q2_K", "Q2_K/m-00001-of-00002.gguf"),
        ("UD-Q3_K_XL", "m-UD-Q3_K_XL.gguf"),
    ],
)  # fmt: skip
def test_a_quantization_means_the_one_model_whose_name_holds_it(quantization: str, file: str) -> None:
    assert quantized_file(quantization, QUANTS) == file


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ("Q4_K", "no GGUF model has Q4_K in its name; there are Q2_K/m-00001-of-00002.gguf, m-BF16-00001-of"),
        ("F16", "no GGUF model has F16 in its name"),
        ("Q3_K_XL", "2 GGUF models have Q3_K_XL in their name: m-Q3_K_XL.gguf, m-UD-Q3_K_XL.gguf; name the one"),
        ("4", "no GGUF model has 4"),
    ],
)
def test_none_and_several_are_listed(quantization: str, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        quantized_file(quantization, QUANTS)
    assert words in str(caught.value)
    with pytest.raises(CheckpointError, match="there are no GGUF models at all"):
        quantized_file(quantization, ["model.safetensors"])


def test_the_name_is_read_with_its_revision() -> None:
    assert parse_hub_id("acme/tiny:Q4_K_M@v1") == HubId("acme/tiny", "v1", quantization="Q4_K_M")
    assert parse_hub_id("acme/tiny/a.gguf:Q4") is None


def test_a_model_named_by_its_quantization_is_fetched_alone_and_found_in_the_cache(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("acme/quants", {name: name.encode() for name in QUANTS})
    found = locate("acme/quants:Q4_K_M")
    assert found.name == "m-Q4_K_M.gguf"
    assert locate("acme/quants:BF16").name == "m-BF16-00001-of-00002.gguf"
    assert hub.fetched() == ["m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf", "m-Q4_K_M.gguf"]
    hub.requests.clear()
    assert locate("acme/quants:q4_k_m") == found
    assert hub.requests == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert locate("acme/quants:q4_k_m") == found
    with pytest.raises(CheckpointError, match=r"no GGUF model has Q8_0 in its name; there are .*HF_HUB_OFFLINE"):
        locate("acme/quants:Q8_0")


def test_the_download_command_takes_it_too(firstlayer: Run, hub: Hub, tmp_path: Path) -> None:
    hub.add("acme/quants", {name: name.encode() for name in QUANTS})
    status, out, _ = firstlayer("download", "acme/quants:Q8_0", "--local-dir", str(tmp_path / "m"))
    assert (status, out) == (0, f"{tmp_path / 'm' / 'm.Q8_0.gguf'}\n")
    assert contents(tmp_path / "m") == {"m.Q8_0.gguf": b"m.Q8_0.gguf"}
    status, out, said = firstlayer("download", "acme/quants:Q5_K_M")
    assert (status, out, said.count("\n")) == (1, "", 1)
    assert "no GGUF model has Q5_K_M in its name; there are" in said


def test_modelscope_has_no_list_to_look_it_up_in(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FIRSTLAYER_USE_MODELSCOPE", "1")
    assert cli.run(["download", "acme/quants:Q8_0"]) == 2
    assert "name the file: acme/quants/FILE.gguf" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../x.json", "/x.json", "a/../../x.json", "a\\b.json", f"{WORK}/notes.json", ""])
def test_no_name_that_leads_out_is_ever_written(name: str, tmp_path: Path) -> None:
    """The list of files and the index refuse such names before; this is the last gate."""
    client = SimpleNamespace(file_download=SimpleNamespace(http_get=_http_get))
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        fetch_files(
            client, HubId("a/b"), [name], tmp_path / "m", commit="0", endpoint=None, make_bar=object, done=print
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def _http_get(resume_size: int, headers: object, expected_size: int, _tqdm_bar: object) -> None:
    """Takes what the client's own function takes."""
