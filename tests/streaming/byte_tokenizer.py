"""Tokenizers of one token for each byte of a text, made by the `tokenizers` package."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 260  # with room for added tokens


def write_byte_tokenizer(folder: Path, *, last: str = "", added: str = "") -> None:
    """tokenizer.json of the folder. `last`: letters that have the last ids; `added`: a special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda letter: (letter in last, letter))
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if added:
        tokenizer.add_special_tokens([AddedToken(added, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
