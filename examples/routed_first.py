"""What is read before the first token: whole layers against `--moe-load routed_first`, beside what chance would give.

usage: python examples/routed_first.py MODEL [--tokens 16] [--seed 0]

T tokens that choose k of E experts each, every choice as likely as any other, touch 1 - (1 - k / E)^T of them. Routers
have favourites, and tokens of one text are alike, so less is read.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass

from layers.sampling_params import SamplingParams
from streaming import LLM
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.sizes import format_size


@dataclass(frozen=True)
class FirstToken:
    """What was read before it, which share of the experts' bytes was in that, and when it was there."""

    nbytes: int
    share: float
    seconds: float


def first_token(model: str, ids: Sequence[int], *, order: str) -> FirstToken:
    """Stream the model in for one token."""
    with LLM(model, moe_load=order) as llm:
        llm.complete([list(ids)], SamplingParams(max_tokens=1, temperature=0.0))
        summary, spans, plan = llm.stats(), llm.tracer.spans(), llm.prepared.plan
    experts = sum(one.plan.read_nbytes for one in plan.experts)
    read = sum(int(s.args["nbytes"]) for s in spans if s.lane == "read" and s.layer.endswith(".experts"))
    share = read / experts if experts else 1.0
    return FirstToken(summary.bytes_before_first_token or 0, share, summary.from_load_s or 0.0)


def touched(*, tokens: int, chosen: int, experts: int) -> float:
    """The share of experts that tokens touch when every choice is as likely."""
    return 1.0 - (1.0 - chosen / experts) ** tokens


def table(model: str, *, tokens: int, seed: int) -> list[str]:
    """The comparison, a line for each order, and the shares."""
    config = prepare(model, LoadOptions()).config
    if config.moe is None:
        raise SystemExit(f"{model}: has no experts")
    draw = random.Random(seed)
    ids = [draw.randrange(config.vocab_size) for _ in range(tokens)]
    whole, routed = (first_token(model, ids, order=order) for order in ("layers", "routed_first"))
    chance = touched(tokens=tokens, chosen=config.moe.top_k, experts=config.moe.num_experts)
    return [
        f"{tokens} tokens, {config.moe.top_k} of {config.moe.num_experts} experts each",
        f"{'layers':<14} {format_size(whole.nbytes):>12} before the first token, {whole.seconds:.3f} s",
        f"{'routed_first':<14} {format_size(routed.nbytes):>12} before the first token, {routed.seconds:.3f} s",
        f"share of the experts' bytes {routed.share:.3f}; of uniform choices {chance:.3f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Bytes before the first token, by the order of experts.")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print("\n".join(table(options.model, tokens=options.tokens, seed=options.seed)))


if __name__ == "__main__":
    main()
