"""One prompt under every quantization scheme: how large the weights are, how long it takes, what comes out.

usage: python examples/compare_schemes.py [MODEL] [--prompt TEXT | --ids 1,2,3] [--max-tokens N] [--device cpu]

Times count from the call that opens the model, with torch already imported. "same" is how many of the first tokens
agree with those of the wide weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import takewhile

from layers.sampling_params import SamplingParams
from quant.registry import scheme_names
from streaming import LLM, Summary
from streaming.cli import parse_ids
from streaming.prompt import Prompt
from streaming.sizes import format_size

HEAD = f"{'scheme':<18} {'kept':>10} {'loaded':>9} {'1st token':>10} {'tokens/s':>9} {'same':>5}  first tokens"


def run(model: str, prompt: Prompt, scheme: str, *, max_tokens: int, device: str) -> Summary:
    """One load and one answer."""
    with LLM(model, quantization=scheme, device=device) as llm:
        llm.complete([prompt], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        llm.wait_loaded()
        return llm.stats()


def rows(model: str, prompt: Prompt, *, max_tokens: int, device: str) -> Iterator[str]:
    """A line for each scheme, wide weights first."""
    run(model, prompt, "none", max_tokens=1, device=device)  # what is done only once is done here
    wide: list[int] = []
    for scheme in scheme_names():
        found = run(model, prompt, scheme, max_tokens=max_tokens, device=device)
        wide = wide or found.token_ids
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(wide, found.token_ids, strict=True)))
        yield row(scheme, found, same)


def row(scheme: str, found: Summary, same: int) -> str:
    """One line of the table."""
    first = repr(found.text[:40]) if found.text else ",".join(map(str, found.token_ids[:8]))
    times = f"{found.load_s or 0:>7.3f} s {found.from_load_s or 0:>8.3f} s {found.decode_tok_s or 0:>9.1f}"
    return f"{scheme:<18} {format_size(found.bytes_kept):>10} {times} {same:>5}  {first}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="One prompt under every quantization scheme.")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--prompt", default="The sea is")
    parser.add_argument("--ids", type=parse_ids, metavar="1,2,3", help="the prompt as token ids")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    print(HEAD)
    for line in rows(
        options.model, options.ids or options.prompt, max_tokens=options.max_tokens, device=options.device
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()
