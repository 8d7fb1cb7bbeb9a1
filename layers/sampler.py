"""From one row of logits to a token: the filters in the order of transformers' processors, all of it in float32.

V vocabulary. A sampler belongs to one sequence: its random numbers depend on its seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from layers.errors import LogitsError
from layers.sampling_params import SamplingParams


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._generator = torch.Generator(device="cpu")
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed)

    def __call__(self, logits: torch.Tensor, *, previous: Sequence[int]) -> int:
        """The next token after `previous` (prompt and what was generated), from its logits [V].

        Raises LogitsError when they hold NaN or infinity.
        """
        params = self.params
        scores = penalize_repetition(logits.float(), previous, penalty=params.repetition_penalty)
        if not scores.max().isfinite():
            raise LogitsError(
                f"the logits hold {scores.max().item()}: the weights hold such numbers, or the activations have "
                "overflowed (float16 does so beyond 65504: try bfloat16 or float32)"
            )
        if params.is_greedy:
            return int(scores.argmax())
        scores = keep_top_k(soften(scores, temperature=params.temperature), top_k=params.top_k)
        scores = keep_min_p(keep_top_p(scores, top_p=params.top_p), min_p=params.min_p)
        return draw(scores.softmax(-1), generator=self._generator)


def penalize_repetition(scores: torch.Tensor, previous: Sequence[int], *, penalty: float) -> torch.Tensor:
    """Divide the positive scores of tokens that occurred, multiply the negative ones (Keskar et al. 2019,
    arXiv:1909.05858). scores [V] -> [V]."""
    if penalty == 1.0 or not previous:
        return scores
    ids = torch.tensor(sorted(set(previous)), dtype=torch.int64, device=scores.device)
    found = scores[ids]
    return scores.index_copy(0, ids, torch.where(found < 0, found * penalty, found / penalty))


def soften(scores: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """scores / temperature, moved so that the highest is 0 (a softmax does not see that): no temperature overflows."""
    return ((scores - scores.max()).double() / temperature).float()


def keep_top_k(scores: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """Minus infinity for all but the k highest scores; those equal to the k-th stay. 0 keeps all."""
    if top_k == 0 or top_k >= scores.shape[-1]:
        return scores
    least = scores.topk(top_k).values[-1]
    return scores.masked_fill(scores < least, -torch.inf)


def keep_top_p(scores: torch.Tensor, *, top_p: float) -> torch.Tensor:
    """Minus infinity for all but the likeliest tokens that together reach `top_p` (Holtzman et al. 2019,
    arXiv:1904.09751); the likeliest stays in any case."""
    if top_p == 1.0:
        return scores
    ascending, order = scores.sort(descending=False)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[-1] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter(0, order, removed), -torch.inf)


def keep_min_p(scores: torch.Tensor, *, min_p: float) -> torch.Tensor:
    """Minus infinity for tokens less likely than `min_p` times the likeliest (Nguyen et al. 2024, arXiv:2407.01082)."""
    if min_p == 0.0:
        return scores
    probs = scores.softmax(-1)
    removed = probs < min_p * probs.max()
    removed[probs.argmax()] = False
    return scores.masked_fill(removed, -torch.inf)


def draw(probs: torch.Tensor, *, generator: torch.Generator) -> int:
    """One token of the distribution [V], by inverting its sum: a single random number for each token.

    The running sum is float64, so that it does not lose the tail of a large vocabulary.
    """
    sums = probs.double().cumsum(-1)
    point = torch.rand((), dtype=torch.float64, generator=generator).to(sums.device) * sums[-1]
    chosen = int(torch.searchsorted(sums, point, right=True))
    # Rounding may put the point on the very end: the last token that can be drawn stands there.
    return min(chosen, int(torch.searchsorted(sums, sums[-1])))
