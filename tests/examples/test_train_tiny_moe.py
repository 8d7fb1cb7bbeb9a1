"""examples/train_tiny_moe.py: what it writes is what it trained, and its routing goes into the comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.compare_expert_policies import main as compare
from examples.compare_expert_policies import read_routing, trained_table
from examples.train_tiny_moe import Model, TinyMoE, documentation, main, routing, train, write_checkpoint
from streaming import LLM

TINY = TinyMoE(
    layers=3, hidden_size=32, heads=2, kv_heads=1, head_dim=16, experts=8, expert_size=16, batch=2, length=24
)
OPTIONS = "--layers 2 --hidden-size 32 --heads 2 --kv-heads 1 --head-dim 16 --experts 8 --expert-size 16 --batch 2"
TEXT = b"The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products so small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def net() -> Model:
    torch.manual_seed(3)
    return Model(TINY)


def test_the_checkpoint_gives_the_logits_of_the_trained_model(net: Model, tmp_path: Path) -> None:
    write_checkpoint(net, tmp_path)
    ids = list(b"Experts come and go.")
    with torch.no_grad():
        expected = net(torch.tensor([ids]))[0][0]
    with LLM(tmp_path, reader="threads", dtype="float32") as llm:
        assert llm.tokenizer.encode("Experts come and go.", add_special_tokens=False) == ids
        assert torch.allclose(llm.logits(ids), expected, atol=1e-4)


def test_training_lowers_the_loss_and_leaves_no_expert_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = torch.tensor(list(TEXT))
    trained = train(TinyMoE(**{**vars(TINY), "layers": 2, "length": 16, "steps": 30}), text)
    first, *_, last = (float(line.split()[3]) for line in capsys.readouterr().out.splitlines())
    assert first > 5.0
    assert last < 0.85 * first
    used = {(layer, e) for token in routing(trained, text)["chosen"] for layer, some in enumerate(token) for e in some}
    assert len(used) > TINY.experts


def test_the_routing_is_what_the_routers_choose(net: Model, tmp_path: Path) -> None:
    text = torch.tensor(list(TEXT[:40]))
    found = routing(net, text)
    assert [len(found["chosen"]), len(found["foreseen"])] == [40, 40]
    with torch.no_grad():
        layers = net(text[None, :24])[2] + net(text[None, 24:])[2]
    assert found["chosen"][5][1] == layers[1].chosen[5].tolist()
    assert found["chosen"][30][2] == layers[5].chosen[6].tolist()
    file = tmp_path / "routing.json"
    file.write_text(json.dumps(found), encoding="utf-8")
    visits, experts = read_routing(file)
    assert (len(visits), experts) == (40 * 3, 8)
    assert visits[16].layer == 1
    assert list(visits[16].units) == found["chosen"][5][1]
    assert list(visits[16].foreseen) == found["foreseen"][5][0]
    assert visits[15].foreseen == ()
    lines = list(trained_table(file))
    assert lines[0].startswith("| room | lru | lfu | expected-use | best |")
    assert lines[-1].startswith("of what a layer's input chooses in the next layer's router, ")


def test_the_command_line_trains_writes_and_says_what_is_too_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_bytes(TEXT)
    main([str(tmp_path / "moe"), "--text", str(text), *OPTIONS.split(), "--steps", "2", "--length", "16",
          "--trace", str(tmp_path / "routing.json"), "--trace-tokens", "32"])  # fmt: skip
    with pytest.raises(SystemExit):
        main([str(tmp_path / "moe"), "--text", str(text), "--trace-tokens", "1900"])
    assert "the text of 1800 bytes is too short" in capsys.readouterr().err
    compare(["--trace", str(tmp_path / "routing.json")])
    assert "| 0.25 |" in capsys.readouterr().out


def test_the_text_is_there_without_a_download() -> None:
    assert len(documentation()) > 300_000


def test_the_comparison_of_made_up_routing_has_a_line_for_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    compare(["--layers", "2", "--experts", "8", "--chosen", "2", "--tokens", "30"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 3 * 3
    for line in lines[2:]:
        *policies, best = (float(cell) for cell in line.strip("| ").split(" | ")[3:])
        assert best >= max(policies)
