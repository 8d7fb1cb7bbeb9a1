"""How byte-level vocabularies cut text before merging: what tokenizer.ggml.pre names. [no-torch]

A GGUF file holds the vocabulary and the merges, but of the pre-tokenizer only a name. The expressions are those of the
models' own tokenizer.json files (for "default": those that llama.cpp uses for files that name none).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pretokenizer:
    """Regular expressions that cut the text one after the other (each match, and what lies between, is a part)."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a part that is a token is taken whole, whether merges lead to it or not
    add_bos: bool = False  # whether a text begins with the beginning token, where the file does not say

    def to_json(self) -> dict[str, Any]:
        """The "pre_tokenizer" entry of a tokenizer.json."""
        cuts = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        bytes_to_characters = {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
        }  # fmt: skip
        return {"type": "Sequence", "pretokenizers": [*cuts, bytes_to_characters]}


def find_pretokenizer(name: str) -> Pretokenizer | None:
    """The pre-tokenizer of that name; None when it is not known."""
    return next((found for names, found in _KNOWN if name in names), None)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
# Words that are cut where a lower-case letter is followed by an upper-case one.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CAMEL = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")

_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACE}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACE}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
_TEKKEN = rf"{_CAMEL[0]}|{_CAMEL[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
_GPT4O = (
    rf"{_CAMEL[0]}{_CONTRACTION}?|{_CAMEL[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACE}"
_BAILING = rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+"

_KNOWN: tuple[tuple[frozenset[str], Pretokenizer], ...] = (
    (
        frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat",
                   "a.x-4.0", "mellum"}),
        Pretokenizer((_GPT2,)),
    ),
    (
        frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}),
        Pretokenizer((r"\p{N}", _GPT2)),
    ),
    (
        frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}),
        Pretokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    (frozenset({"dbrx", "smaug-bpe", "glm4", "chatglm-bpe"}), Pretokenizer((_LLAMA3,))),
    (
        frozenset({"qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "megrez", "kormo", "grok-2"}),
        Pretokenizer((_QWEN2,)),
    ),
    (frozenset({"qwen35"}), Pretokenizer((_QWEN35,))),
    (frozenset({"tekken"}), Pretokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    (frozenset({"gpt-4o", "llama4", "kanana2", "minimax-m2"}), Pretokenizer((_GPT4O,))),
    (
        frozenset({"deepseek-v3", "hunyuan-dense", "joyai-llm"}),
        Pretokenizer((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)),
    ),
    (
        frozenset({"deepseek-coder"}),
        Pretokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")),
    ),
    (frozenset({"falcon"}), Pretokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (frozenset({"seed-coder"}), Pretokenizer((_SEED_CODER,))),
    (frozenset({"bailingmoe", "bailingmoe2", "llada-moe"}), Pretokenizer((_BAILING,))),
    (
        frozenset({"default"}),
        Pretokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
)  # fmt: skip
