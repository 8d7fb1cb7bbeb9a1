"""The sums behind the numbers of streaming.quality_report, in float64, a strip at a time so that memory is bounded.

O out_features, I in_features, T tokens, D hidden size, n positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from layers.weights import ParamSpec
from quant.sections import cut_rows, rows_at_once
from streaming.quality_report import Noise

STRIP_ROWS = 1024  # of a weight: a multiple of every block's height


@dataclass(frozen=True)
class LogitsSums:
    """Sums over positions. `wide_loss` and `loss`: minus the log probability of the token that comes, in nats."""

    positions: int = 0
    divergence: float = 0.0
    agreed: int = 0
    wide_loss: float = 0.0
    loss: float = 0.0

    def __add__(self, other: LogitsSums) -> LogitsSums:
        return LogitsSums(
            self.positions + other.positions,
            self.divergence + other.divergence,
            self.agreed + other.agreed,
            self.wide_loss + other.wide_loss,
            self.loss + other.loss,
        )


def weight_noise(param: ParamSpec, stored: Mapping[str, torch.Tensor], wide: torch.Tensor) -> Noise:
    """How far the stored form of `param` (its tensors by name) is from its wide weight [O, I]."""
    total = Noise()
    first = 0
    for rows in _dequantized(param, stored):
        total += tensor_noise(rows, wide[first : first + rows.shape[0]])
        first += rows.shape[0]
    return total


def _dequantized(param: ParamSpec, stored: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The weight's rows in float32, in order: each section by itself, a long one in strips."""
    scheme, sections, columns = param.scheme, param.kept_rows, param.shape[1]
    for index, rows in enumerate(sections):
        views = scheme.section_views(stored, sections, index)
        if rows <= STRIP_ROWS:
            yield scheme.dequantize(views, (rows,), dtype=torch.float32, in_features=columns)
            continue
        step = rows_at_once(STRIP_ROWS, multiple=scheme.row_multiple)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            part = cut_rows(views, rows=rows, multiple=scheme.row_multiple, start=start, stop=stop)
            yield scheme.dequantize(part, (stop - start,), dtype=torch.float32, in_features=columns)


def tensor_noise(found: torch.Tensor, wide: torch.Tensor) -> Noise:
    """The noise in `found` against `wide`, tensors of one shape [rows, ...]."""
    total = Noise()
    for part, expected in zip(found.split(STRIP_ROWS), wide.split(STRIP_ROWS), strict=True):
        signal = expected.double().flatten()
        error = part.double().flatten() - signal
        total += Noise(signal.numel(), float(signal.dot(signal)), float(error.dot(error)))
    return total


def state_noise(found: torch.Tensor, wide: torch.Tensor) -> Noise:
    """The noise in hidden states [T, D], each token's against its own size: T is the signal, sum |error|^2 / |wide|^2
    the noise. (Some models give a text's first token states a thousand times larger than all others, which would be
    all that a plain sum sees.)"""
    expected = wide.double()
    signal, noise = expected.square().sum(-1), (found.double() - expected).square().sum(-1)
    ratios = torch.where(noise == 0, 0.0, noise / signal)
    return Noise(ratios.numel(), float(ratios.numel()), float(ratios.sum()))


def logits_sums(wide: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> LogitsSums:
    """Of logits [n, V] beside the wide model's, and the tokens [n] that come."""
    expected, log_probs = wide.double().log_softmax(-1), found.double().log_softmax(-1)
    probs = expected.exp()
    # A token that is impossible to both (a logit of minus infinity) adds nothing; inf - inf would be nan.
    terms = torch.where(probs == 0, 0.0, probs * (expected - log_probs))
    pick = targets.unsqueeze(1)
    return LogitsSums(
        positions=targets.shape[0],
        divergence=float(terms.sum()),
        agreed=int((wide.argmax(-1) == found.argmax(-1)).sum()),
        wide_loss=-float(expected.gather(1, pick).sum()),
        loss=-float(log_probs.gather(1, pick).sum()),
    )
