"""Files made to break the reader: each ends in words that name it, whatever it holds and wherever it lies."""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streaming import cli
from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.index import read_index
from streaming.checkpoint.report import MOST_PROBLEMS, Report
from streaming.checkpoint.safetensors import read_safetensors_header
from streaming.checkpoint.tensors import MOST_TENSORS
from streaming.errors import CheckpointError, CheckpointFormatError
from streaming.fast_tokenizer import load_tokenizer
from streaming.generation_config import defaults_from_configs
from streaming.gguf_tokenizer import LONGEST_PIECE, gguf_recipe
from streaming.tekken import tekken_recipe
from streaming.tokenizer import open_tokenizer
from streaming.tokenizer_config import TokenizerSettings, read_tokenizer_settings
from tests.streaming.checkpoint.build import entry, safetensors_bytes


def with_tensor_called(folder: Path, root: Path, name: str) -> Path:
    """The model with one more tensor in a file of its own."""
    shutil.copytree(folder, root)
    (root / "model.safetensors.index.json").unlink()
    (root / "more.safetensors").write_bytes(safetensors_bytes({name: entry([1], 0, 4)}, bytes(4)))
    return root


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b[31m\nfirstlayer: all is well", r"'a\x1b[31m\nfirstlayer: all is well': the name holds control"),
        ("a\ud800", r"'a\ud800': the name holds control characters"),
        ("x" * 100_000, "...: the name has 100,000 characters"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_a_tensor_name_that_is_none_is_refused_in_one_plain_line(
    name: str, shown: str, command: str, four_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = with_tensor_called(four_layers, tmp_path / "model", name)
    assert cli.run([command, str(root), "--model-loader-extra-config", '{"enable_weights_track": false}']) == 1
    found = capsys.readouterr()
    assert found.err.count("\n") == 1
    assert found.err[:-1].isprintable()
    assert f"{root}/more.safetensors: a tensor is called " in found.err
    assert shown in found.err
    assert found.out == ""
    assert len(found.err) < 1000


def test_what_is_printed_holds_no_control_characters_and_ends() -> None:
    assert cli.printable("a\x1b]0;x\x07\u202eb\nc\n  d") == "a\\x1b]0;x\\x07\\u202eb\\nc\n  d"
    assert cli.printable("ü" * 9000) == "ü" * 8000 + "... (1,000 more characters)"


def test_a_folder_whose_name_holds_a_line_end_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a\nb").mkdir()
    assert cli.run(["plan", str(tmp_path / "a\nb")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_out_of_descriptors_names_the_limit_and_not_a_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*ignored: object, **also: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/somewhere/evaluate.py")

    monkeypatch.setattr("streaming.commands.plan.prepare", fail)
    assert cli.run(["plan", "demo"]) == 1
    error = capsys.readouterr().err
    assert "ulimit -n" in error
    assert "evaluate.py" not in error


@pytest.mark.parametrize("text", [b"{}," * 800_000, b'{"a":1},' * 800_000, b"[]," * 800_000, b"1," * 4_000_000])
def test_json_that_would_grow_far_beyond_its_size_is_not_parsed(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a":[' + text + b"0]}")
    with pytest.raises(CheckpointFormatError, match=r"config\.json: is not valid JSON: it holds [\d,]+ values or more"):
        read_json_object(path)


def test_more_tensors_than_any_model_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(MOST_TENSORS + 1))
    path.write_bytes(safetensors_bytes(b"{" + tensors + b"}"))
    with pytest.raises(CheckpointFormatError, match=r"a\.safetensors: has 262,145 tensors; at most 262,144 are read"):
        read_safetensors_header(path)


@pytest.mark.parametrize(
    ("count", "files", "words"),
    [(MOST_TENSORS + 1, 1, "places 262,145 tensors; at most 262,144"), (10_001, 10_001, "names 10,001 files; at most")],
)
def test_an_index_of_more_than_any_model_has_is_refused(count: int, files: int, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {f"{i}": f"{i % files}.safetensors" for i in range(count)}}))
    with pytest.raises(CheckpointFormatError, match=words):
        read_index(path)


def test_a_report_keeps_a_bounded_number_of_problems_and_counts_all() -> None:
    report = Report("a.safetensors")
    for number in range(MOST_PROBLEMS + 5):
        report.add(f"problem {number}")
    with pytest.raises(CheckpointError, match=f"^{MOST_PROBLEMS + 5} problems in a.safetensors: .* more$") as caught:
        report.raise_if_any()
    assert len(caught.value.problems) == MOST_PROBLEMS


def test_a_long_entry_is_not_repeated_in_full(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({"a": {f"{'k' * 99}{number}": 1 for number in range(1000)}}))
    with pytest.raises(CheckpointFormatError, match="should have dtype, shape and data_offsets") as caught:
        read_safetensors_header(path)
    assert len(str(caught.value)) < 500


# --- tokenizers' files -----------------------------------------------------------------------------------------------


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def an_endless_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_large_file(path: Path) -> None:
    path.write_bytes(b" " * ((4 << 20) + 1))


@pytest.mark.parametrize("made", [a_pipe, an_endless_device, a_large_file])
def test_a_chat_template_that_is_no_small_file_is_refused(made: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    made(tmp_path / "additional_chat_templates" / "x.jinja")
    with pytest.raises(
        CheckpointFormatError, match=r"x\.jinja: (is not a regular file|4194305 bytes of chat template)"
    ):
        read_tokenizer_settings(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"added_tokens_decoder":{"' + b"9" * 5000 + b'":{"content":"x"}}}', "added_tokens_decoder holds '9999"),
        (b'{"added_tokens_decoder":{"9":{"content":"\\ud800"}}}', "added_tokens_decoder holds '9'"),
        (b'{"bos_token":"\\udfff"}', "bos_token is"),
    ],
)
def test_tokens_that_are_none_are_named(text: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(text)
    with pytest.raises(CheckpointFormatError, match=words) as caught:
        read_tokenizer_settings(tmp_path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("key", ["temperature", "repetition_penalty"])
def test_a_whole_number_beyond_all_floats_is_refused(key: str) -> None:
    with pytest.raises(CheckpointFormatError, match=f"{key} is 1000"):
        defaults_from_configs({key: 10**400}, {}, folder=Path("model"))


MODEL = {"type": "WordLevel", "vocab": {"b": 1}, "unk_token": "<nope>"}
TOKENIZER: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": MODEL,
}  # fmt: skip
NAMELESS = {
    "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "X", "type_id": 0}}], "pair": [],
    "special_tokens": {},
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"post_processor": NAMELESS, "model": {**MODEL, "unk_token": "b"}}])
def test_a_tokenizer_that_fails_only_when_it_is_used_is_named(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**TOKENIZER, **changes}))
    tokenizer = load_tokenizer(path, settings=TokenizerSettings())
    with pytest.raises(CheckpointFormatError, match=r"tokenizer\.json: cannot encode a text: "):
        tokenizer.encode("a", add_special_tokens=True)


def test_a_panic_of_the_package_is_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**TOKENIZER, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}))
    with pytest.raises(CheckpointFormatError, match=r"tokenizer\.json: tokenizers .* cannot read it"):
        load_tokenizer(path, settings=TokenizerSettings())


@pytest.mark.parametrize("name", ["tokenizer.json", "tekken.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizers_file_that_links_out_of_the_hubs_cache_is_refused(name: str, tmp_path: Path) -> None:
    from streaming.checkpoint.tensors import Checkpoint

    folder = tmp_path / "hub" / "models--owner--name" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (tmp_path / "outside").write_text("{}")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=f"{name}: is a link out of the hub's cache"):
        open_tokenizer(Checkpoint(folder, "safetensors", {}, (), {}, {}))


SENTENCEPIECE: dict[str, Any] = {
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "a", "b"],
    "tokenizer.ggml.scores": [0.0, -1.0, -2.0], "tokenizer.ggml.token_type": [2, 1, 1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": ["a", "b", 3]}, "tokens is missing or is no list of texts"),
        ({"scores": 5}, "scores is no list of numbers"),
        ({"scores": [0, "1", 2]}, "scores is no list of numbers"),
        ({"token_type": [[], 1, 1]}, "token_type is no list of numbers"),
        ({"tokens": ["a", "b", "c" * (LONGEST_PIECE + 1)]}, "token 2 has 513 characters"),
    ],
)
def test_metadata_of_other_kinds_than_a_gguf_file_holds_are_named(changes: dict[str, Any], words: str) -> None:
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointFormatError, match=words):
        gguf_recipe({**SENTENCEPIECE, **changed}, source="gguf_metadata.json")


def test_a_vocabulary_made_of_its_own_beginnings_is_refused(tmp_path: Path) -> None:
    """511 tokens of one letter, each longer than the one before: every one can be cut anywhere."""
    tokens = [*(bytes([byte]) for byte in range(256)), *(b"a" * length for length in range(2, 513))]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    config = {"pattern": "a", "default_vocab_size": len(tokens) + 1, "default_num_special_tokens": 1}
    path = tmp_path / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": []}))
    with pytest.raises(
        CheckpointFormatError, match=r"tekken\.json: its 767 tokens can be put together in too many ways"
    ):
        tekken_recipe(path)


def test_a_header_of_empty_lists_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    text = b'{"a":[' + b"[]," * 1_600_000 + b"0]}"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointFormatError, match="its header is not valid: it holds 1,600,002 values or more"):
        read_safetensors_header(path)
