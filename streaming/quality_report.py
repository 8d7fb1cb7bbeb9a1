"""What a scheme does to a model, in numbers: of the weights layer by layer, of the logits on a text. [no-torch]

Definitions, all sums in float64:

- SQNR of weights, dB: 10 log10(sum w^2 / sum (w - q)^2) over the weights that the scheme keeps quantized, where w is a
  number of the wide model (as loaded, in its dtype) and q the number that the stored form stands for. A total adds the
  sums of all layers, so a large layer counts for more.
- SQNR of outputs, dB: -10 log10 of the mean over tokens of |h - g|^2 / |h|^2, where h is the wide model's hidden state
  behind the layer and g the scheme's, with every layer before it quantized too: how the error grows on its way. Each
  token counts the same, however large its state.
- KL divergence, nats per token: the mean over positions of sum p (log p - log q), p the wide model's probabilities of
  the next token and q the scheme's.
- Top-1 agreement: the share of positions where both find the same token the likeliest.
- Perplexity: e to the mean of -log(probability of the token that comes), over the same positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from layers.weights import LayerSpec, ParamSpec


@dataclass(frozen=True)
class Noise:
    """Sums of squares: of `count` numbers, and of what became of them minus what they were."""

    count: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def __add__(self, other: Noise) -> Noise:
        return Noise(self.count + other.count, self.signal + other.signal, self.noise + other.noise)

    @property
    def sqnr_db(self) -> float | None:
        """Their ratio in dB: infinite where nothing differs, nan where a number is none; None of no numbers."""
        if self.count == 0:
            return None
        if not math.isfinite(self.signal) or not math.isfinite(self.noise):
            return math.nan
        if self.noise == 0.0:
            return math.inf
        return 10.0 * math.log10(self.signal / self.noise) if self.signal else -math.inf


@dataclass(frozen=True)
class LayerQuality:
    """One layer under a scheme: its quantized weights, and its output (None of the head: its output is the logits)."""

    name: str
    weights: Noise
    outputs: Noise | None

    @property
    def weights_db(self) -> float | None:
        """SQNR of its quantized weights; None where it has none."""
        return self.weights.sqnr_db

    @property
    def outputs_db(self) -> float | None:
        """SQNR of its output; None of the head."""
        return None if self.outputs is None else self.outputs.sqnr_db


@dataclass(frozen=True)
class SchemeQuality:
    """A whole model under a scheme, against its wide form."""

    quantization: str
    kept_nbytes: int
    layers: tuple[LayerQuality, ...]
    kl_divergence: float
    top1_agreement: float
    perplexity: float

    @property
    def weights(self) -> Noise:
        """Of all quantized weights together."""
        return add_all(layer.weights for layer in self.layers)

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of all quantized weights together; None where the scheme keeps none."""
        return self.weights.sqnr_db


@dataclass(frozen=True)
class Quality:
    """What `measure_quality` found. `tokens` of the text were used, in `runs` that begin anew, and `positions` of them
    have a prediction."""

    model: str
    model_type: str
    dtype: str
    text: str
    tokens: int
    tokens_left_out: int
    runs: int
    positions: int
    kept_nbytes: int
    perplexity: float
    schemes: tuple[SchemeQuality, ...]
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """As JSON holds it; a ratio that is no number or infinite (nothing differs) is null."""
        return {
            "model": self.model, "model_type": self.model_type, "dtype": self.dtype, "text": self.text,
            "tokens": self.tokens, "tokens_left_out": self.tokens_left_out, "runs": self.runs,
            "positions": self.positions, "bytes_kept": self.kept_nbytes, "perplexity": finite(self.perplexity),
            "schemes": [_scheme_dict(scheme) for scheme in self.schemes], "warnings": list(self.warnings),
        }  # fmt: skip


def add_all(parts: Iterable[Noise]) -> Noise:
    """The sums of several parts."""
    total = Noise()
    for part in parts:
        total += part
    return total


def quantized_params(spec: LayerSpec) -> list[ParamSpec]:
    """The parameters of a layer that a scheme keeps in another form than the wide one."""
    return [param for param in spec.params if param.is_quantized]


def finite(value: float | None) -> float | None:
    """The value; None for what JSON has no word for."""
    return value if value is not None and math.isfinite(value) else None


def _scheme_dict(scheme: SchemeQuality) -> dict[str, object]:
    return {
        "quantization": scheme.quantization, "bytes_kept": scheme.kept_nbytes,
        "weights": scheme.weights.count, "sqnr_db": finite(scheme.sqnr_db),
        "kl_divergence": finite(scheme.kl_divergence), "top1_agreement": scheme.top1_agreement,
        "perplexity": finite(scheme.perplexity), "layers": [_layer_dict(layer) for layer in scheme.layers],
    }  # fmt: skip


def _layer_dict(layer: LayerQuality) -> dict[str, object]:
    return {
        "name": layer.name, "weights": layer.weights.count, "sqnr_db": finite(layer.weights_db),
        "output_sqnr_db": finite(layer.outputs_db),
    }  # fmt: skip
