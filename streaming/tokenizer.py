"""Text to token ids and back: the protocol, and the way to open a checkpoint's tokenizer. [no-torch]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Protocol

from streaming.checkpoint.members import hub_root_of, member_fault
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointError, StreamingError
from streaming.gguf_tokenizer import gguf_recipe
from streaming.text_decoding import Decoding
from streaming.tokenizer_config import read_tokenizer_settings


class Tokenizer(Protocol):
    """What turns text into token ids and back. Immutable; may be used from several threads."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's embedding may have more rows."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where there is one."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The token that ends a text, by the tokenizer's own files (generation_config.json may name more)."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the named special tokens, by role: "bos_token", "eos_token", "unk_token", "pad_token", ..."""
        ...

    @property
    def special_ids(self) -> AbstractSet[int]:
        """Ids that `skip_special_tokens` leaves out."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources by name; "default" is the usual one. Empty for a model that is not made for chat."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The default chat template."""
        ...

    @property
    def decoding(self) -> Decoding:
        """How pieces become text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        With `add_special_tokens` the model's beginning (and end) tokens are put around it, where it has them. A
        rendered chat template holds them already: encode it with False.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`; ids that are not in the vocabulary have none."""
        ...

    def piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that is not in the vocabulary."""
        ...

    def token_id(self, piece: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        ...


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that a checkpoint brings: tokenizer.json or tekken.json of its folder, or a GGUF's own metadata.

    Raises CheckpointError when there is none, CheckpointFormatError when it is broken, StreamingError when the
    `tokenizers` package is missing.
    """
    try:
        from streaming.fast_tokenizer import build_tokenizer, load_tokenizer
    except ImportError as error:
        if error.name != "tokenizers":
            raise
        raise StreamingError(
            "text needs the package tokenizers, which is not installed: pip install tokenizers, "
            "or give token ids (--ids 1,2,3)"
        ) from error
    if checkpoint.format == "gguf" or checkpoint.metadata:  # a GGUF's, or what save-shards kept of one
        return build_tokenizer(gguf_recipe(checkpoint.metadata, source=checkpoint.name))
    folder = checkpoint.root if checkpoint.root.is_dir() else checkpoint.root.parent
    _check_links(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        if (tekken := folder / "tekken.json").is_file():
            from streaming.tekken import tekken_recipe

            return build_tokenizer(tekken_recipe(tekken))
        raise CheckpointError(_no_tokenizer(folder, name=checkpoint.address or str(folder)))
    return load_tokenizer(path, settings=read_tokenizer_settings(folder))


_TEXT_FILES = (
    "tokenizer.json", "tekken.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def _check_links(folder: Path) -> None:
    """In the hub's cache, a file that is a link out of it is refused, as config and weights are."""
    if (root := hub_root_of(folder)) is None:
        return
    for path in (folder / name for name in _TEXT_FILES):
        if path.is_file() and (fault := member_fault(path, root)):
            raise CheckpointError(f"{path}: {fault}")


# What other libraries keep a vocabulary in; none of them is read here.
_OTHER_VOCABULARIES = (
    "tokenizer.model",
    "tokenizer.model.v3",
    "vocab.json",
    "spiece.model",
    "tiktoken.model",
    "vocab.txt",
)


def _no_tokenizer(folder: Path, *, name: str) -> str:
    """The message for a folder without tokenizer.json, which the user calls `name`."""
    others = [name for name in _OTHER_VOCABULARIES if (folder / name).is_file()]
    found = f" ({', '.join(others)} is there, but is not read)" if others else ""
    convert = (
        "write a tokenizer.json with transformers' AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        if others
        else "fetch the model's tokenizer.json"
    )
    return f"{name}: has no tokenizer.json{found}; {convert}, or give token ids (--ids 1,2,3), which need none"
