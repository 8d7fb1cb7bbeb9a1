"""How well a scheme keeps a model: it is walked layer by layer in its wide form and under every scheme, side by side.

No model is held whole. Each layer is loaded wide, then in each scheme by the stages of any load (streaming.one_layer),
so what is measured is what a load keeps; the hidden states of the text wait in between. The most that is held at once:
one wide layer, one quantized layer, the hidden states of the text (1 + number of schemes times), the KV cache of a run,
and logits of a few positions. Definitions of the numbers: streaming.quality_report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

from streaming.errors import OptionError
from streaming.interrupts import interrupt_kept
from streaming.llm import LoadKeywords
from streaming.options import LoadOptions
from streaming.prepare import DEFAULT_CACHE_TOKENS, Prepared, prepare
from streaming.prompt import Prompt
from streaming.quality_passage import PASSAGE
from streaming.quality_report import Quality, SchemeQuality, quantized_params
from streaming.quality_text import Run, cut_into_runs, encode_text
from streaming.tokenizer import open_tokenizer
from streaming.torch_import import import_torch

if TYPE_CHECKING:
    from streaming.quality_walk import SchemeSums

DEFAULT_MAX_TOKENS = 2048  # of the text
_OF_SCHEMES = frozenset({"quantize_head", "scale_percentile"})  # options that wide weights do not go with


def unheard(layer: str, done: int, total: int) -> None:
    """The progress of a measurement that nobody watches."""


def measure_quality(
    model: str | Path,
    quantizations: Sequence[str],
    *,
    text: Prompt | None = None,
    text_name: str | None = None,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    progress: Callable[[str, int, int], None] = unheard,
    **options: Unpack[LoadKeywords],
) -> Quality:
    """Hold a model in each of `quantizations` against its wide form, on the first `max_tokens` tokens of a text.

    `text`: words, or token ids (None: a built-in passage of about 600 tokens), called `text_name` in the result. It is
    cut into runs of `max_model_len` tokens (unless given: 2048, or the model's positions where they are fewer).
    `progress(layer, done, total)` is called before each layer. Other keywords as for `LLM`, but for `quantization` and
    `memory`; `kv_cache_dtype` and `activation_dtype` are those of the schemes, not of the wide model.

    Raises OptionError for a scheme that is not known, a text too short to predict a token of, and a model that has no
    wide form; CheckpointError for a text without a tokenizer; what `prepare` and a load raise.
    """
    _check_options(quantizations, max_tokens, options)
    wide = _planned(str(model), "none", _reference_options(options))
    _check_wide(wide)
    names = dict.fromkeys(quantizations)
    schemes = {name: _planned(str(model), name, _scheme_options(options, name)) for name in names}
    runs, found, left_out = _runs(wide, PASSAGE if text is None else text, max_tokens)
    with interrupt_kept():
        import_torch(whole=True)
    from streaming.quality_walk import measure_schemes

    sums = measure_schemes(wide, list(schemes.values()), runs, progress=progress)
    positions, loss = sums[0].logits.positions, sums[0].logits.wide_loss
    return Quality(
        model=str(model),
        model_type=wide.config.model_type,
        dtype=wide.dtype.torch_name,
        text=text_name or ("the built-in passage" if text is None else "the given text"),
        tokens=found,
        tokens_left_out=left_out,
        runs=len(runs),
        positions=positions,
        kept_nbytes=wide.plan.kept_nbytes,
        perplexity=_exp(loss / positions),
        schemes=tuple(map(_scheme_quality, schemes, schemes.values(), sums)),
        warnings=tuple(dict.fromkeys(text for one in (wide, *schemes.values()) for text in one.warnings)),
    )


def _check_options(quantizations: Sequence[str], max_tokens: int, options: LoadKeywords) -> None:
    if isinstance(quantizations, str) or not quantizations:
        raise OptionError(f"quantizations {quantizations!r}: a list of at least one scheme is needed")
    if "quantization" in options:
        raise OptionError("quantization: measure_quality takes a list of schemes, as its second argument")
    if options.get("memory") is not None:
        raise OptionError(f"--memory {options['memory']}: quality holds one layer at a time, whatever the model's size")
    if options.get("quantization_config") is not None:
        raise OptionError(
            "--quantization-config: quality compares schemes that a whole model is in: --quantization A,B"
        )
    if options.get("quantize_head") and set(quantizations) == {"none"}:
        raise OptionError("--quantize-head needs a --quantization other than none")
    if type(max_tokens) is not int or max_tokens < 1:
        raise OptionError(f"--max-tokens {max_tokens!r}: a whole number of at least 1 is needed")


def _reference_options(options: LoadKeywords) -> LoadKeywords:
    """The options without those that change numbers: the reference computes in the model's own dtype throughout."""
    return _without(options, _OF_SCHEMES | {"kv_cache_dtype", "activation_dtype"})


def _scheme_options(options: LoadKeywords, quantization: str) -> LoadKeywords:
    return _without(options, _OF_SCHEMES) if quantization == "none" else options


def _without(options: LoadKeywords, names: frozenset[str]) -> LoadKeywords:
    return cast("LoadKeywords", {name: value for name, value in options.items() if name not in names})


def _planned(model: str, quantization: str, options: LoadKeywords) -> Prepared:
    return prepare(model, LoadOptions(**options | {"quantization": quantization}))


def _check_wide(prepared: Prepared) -> None:
    """Refuse a checkpoint that is kept in a scheme already: there is nothing to hold others against."""
    kept = sorted({param.scheme.name for spec in prepared.specs for param in quantized_params(spec)})
    if kept:
        raise OptionError(
            f"{prepared.checkpoint.name}: is stored in {', '.join(kept)} and has no wide form, which quality compares "
            "with: give the model that it was made from"
        )


def _runs(wide: Prepared, text: Prompt, max_tokens: int) -> tuple[tuple[Run, ...], int, int]:
    """The runs, how many of the text's tokens are in them, and how many are not."""
    prefix: list[int] = []
    if isinstance(text, str):
        if not text.strip():
            raise OptionError("the text is empty: at least two tokens are needed")
        ids, prefix = encode_text(open_tokenizer(wide.checkpoint), text)
    else:
        ids = list(text)
    vocab = wide.config.vocab_size
    wrong = next((token for token in (*prefix, *ids) if type(token) is not int or not 0 <= token < vocab), None)
    if wrong is not None:
        raise OptionError(f"token id {wrong!r} is not in the vocabulary of {vocab} (0 to {vocab - 1})")
    longest = wide.options.max_model_len or min(DEFAULT_CACHE_TOKENS, wide.config.max_position_embeddings)
    used = ids[:max_tokens]
    return cut_into_runs(used, prefix=prefix, length=longest), len(used), len(ids) - len(used)


def _scheme_quality(name: str, prepared: Prepared, sums: SchemeSums) -> SchemeQuality:
    logits = sums.logits
    return SchemeQuality(
        quantization=name,
        kept_nbytes=prepared.plan.kept_nbytes,
        layers=sums.layers,
        kl_divergence=logits.divergence / logits.positions,
        top1_agreement=logits.agreed / logits.positions,
        perplexity=_exp(logits.loss / logits.positions),
    )


def _exp(loss: float) -> float:
    try:
        return exp(loss)
    except OverflowError:
        return float("inf")
