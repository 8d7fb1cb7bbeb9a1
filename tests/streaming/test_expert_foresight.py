"""Looking ahead: what is foreseen, when it pays, and that it changes no bits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from layers.moe import SparseMLP
from layers.sampling_params import SamplingParams
from streaming import LLM
from streaming.expert_foresight import MOST_TOKENS, make_foresight
from streaming.expert_outlook import Outlook
from streaming.expert_plan import least_expert_nbytes
from streaming.options import LoadOptions
from streaming.prepare import prepare
from tests.streaming.sparse_models import Folder, bound_experts, cache_of, folder_of

IDS = [5, 9, 2, 7, 11, 3, 17, 4, 23, 8, 31, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return folder_of(tmp_path_factory.mktemp("foresight"))


def test_the_next_router_chooses_from_what_this_layer_is_given(folder: Folder) -> None:
    with LLM(folder("many"), reader="threads", dtype="float32") as llm:
        llm.wait_loaded()
        seen: list[tuple[str, list[int]]] = []
        ready, wanted = {"layers.1"}, list[int]()
        foresight = make_foresight(
            llm.shell,
            llm.kernels,
            is_ready=ready.__contains__,
            foresee=lambda p, e: seen.append((p, list(e))),
            is_wanted=lambda: bool(wanted),
        )
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
        params = [param.name for one in llm.prepared.specs for param in one.params if "gate_up_proj" in param.name]
        with torch.inference_mode():
            foresight(params[0], x)
            wanted.append(1)
            for param in params:
                foresight(param, x)  # the router of layer 2 is not there, and behind it comes none
            foresight(params[0], torch.randn(MOST_TOKENS + 1, 64))
            gate = llm.shell.get_parameter(f"{params[1].removesuffix('experts.gate_up_proj.weight')}gate.weight")
            best = (x @ gate.T).topk(4).indices
    assert len(params) == 3
    ((param, experts),) = seen
    assert param == params[1]
    assert experts == list(dict.fromkeys(best.T.flatten().tolist()))


def test_what_is_foreseen_is_fetched_where_it_pays_and_bits_stay(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    least = least_expert_nbytes(prepare(str(folder("many")), LoadOptions(moe_load="routed_first")).plan)
    with LLM(folder("many"), reader="threads") as llm:
        expected = llm.complete([IDS], params)[0].token_ids
    found = {}
    for pays in (True, False):
        monkeypatch.setattr(Outlook, "pays", property(lambda outlook, pays=pays: pays))
        monkeypatch.setattr(Outlook, "is_worth_a_look", property(lambda outlook: True))
        bound_experts(monkeypatch, 12 * least)
        with LLM(folder("many"), moe_load="routed_first", reader="threads") as llm:
            assert llm.complete([IDS], params)[0].token_ids == expected
            counts = found[pays] = cache_of(llm).counts
            assert cache_of(llm).outlook.share_right != 0.5  # it is looked at either way
        assert counts.peak_nbytes <= 12 * least
    assert found[True].foreseen_used + found[True].foreseen_wasted > 0
    assert found[False].foreseen_used + found[False].foreseen_wasted == 0


def test_it_pays_by_the_share_that_was_right_and_the_clock() -> None:
    outlook = Outlook()
    assert not outlook.pays
    for _ in range(50):
        outlook.came_true(3, 4)
        outlook.fetched(0.010)
        outlook.computed(0.002)
    assert outlook.share_right == pytest.approx(0.75, abs=0.01)
    assert not outlook.pays  # 2 ms against a quarter of 10 ms
    for _ in range(200):
        outlook.computed(0.003)
    assert outlook.pays
    for _ in range(400):
        outlook.came_true(1, 4)
    assert outlook.share_right == pytest.approx(0.25, abs=0.02)
    assert not outlook.pays


def test_guesses_that_are_seldom_right_are_not_followed() -> None:
    outlook = Outlook()
    outlook.computed(0.1)  # although there is time enough
    outlook.fetched(0.01)
    assert outlook.pays
    outlook.came_true(0, 5)
    assert outlook.share_right < 0.3
    assert not outlook.pays


def test_what_comes_at_once_is_not_fetched_ahead() -> None:
    outlook = Outlook()
    outlook.came_true(3, 4)
    outlook.computed(0.1)
    outlook.fetched(0.0019)
    assert not outlook.is_worth_a_look
    assert not outlook.pays
    for _ in range(100):
        outlook.fetched(0.0021)
    assert outlook.is_worth_a_look
    assert outlook.pays


def test_all_sparse_layers_but_the_last_look_ahead(folder: Folder) -> None:
    with LLM(folder("deepseek_v3"), reader="threads") as llm:  # its first layer is dense
        llm.wait_loaded()
        sparse = [layer.mlp for layer in llm.shell.layers if isinstance(layer.mlp, SparseMLP)]
        found = make_foresight(llm.shell, llm.kernels, is_ready=bool, foresee=lambda *_: None, is_wanted=bool)
        by_param = found.by_param
        after = {one.experts.gate_up_proj.name: two for one, two in pairwise(sparse)}
        assert {param: mlp for param, (_, mlp) in by_param.items()} == after
        assert [name for name, _ in by_param.values()] == ["layers.2"]
