"""The tokenizer of the `tokenizers` package behind our protocol; the only module that imports it. [no-torch]"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from streaming.errors import CheckpointFormatError, StreamingError
from streaming.gguf_tokenizer import TokenizerRecipe
from streaming.panic_text import is_panic, without_panic_text
from streaming.text_decoding import Decoding, decoding_from_json
from streaming.tokenizer_config import DEFAULT_TEMPLATE, AddedTokenSpec, TokenizerSettings


def load_tokenizer(path: Path, *, settings: TokenizerSettings) -> FastTokenizer:
    """The tokenizer of a tokenizer.json file. Raises CheckpointFormatError when the file is none."""
    try:
        with without_panic_text():
            backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        _pass_others_on(error)
        raise CheckpointFormatError(
            f"{path}: tokenizers {tokenizers.__version__} cannot read it: {_one_line(error)}; "
            "fetch the file again, or install a newer tokenizers"
        ) from error
    backend.no_truncation()  # training leftovers in the file; a prompt is never cut or padded
    backend.no_padding()
    for _, spec in sorted(settings.added_tokens.items()):
        if backend.token_to_id(spec.content) is None:
            _add(backend, [spec])
    return FastTokenizer(backend, settings, source=str(path))


def build_tokenizer(recipe: TokenizerRecipe) -> FastTokenizer:
    """The tokenizer that a recipe describes. Raises CheckpointFormatError when its merges and tokens disagree."""
    shell: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": recipe.normalizer,
        "pre_tokenizer": recipe.pre_tokenizer,
        "post_processor": None,
        "decoder": recipe.decoder,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    try:
        with without_panic_text():
            backend = tokenizers.Tokenizer.from_str(json.dumps(shell))
            # Handing the vocabulary over as objects takes half the time that it takes inside the JSON text.
            backend.model = models.BPE(
                vocab=recipe.vocab,
                merges=recipe.merges,
                unk_token=recipe.unk_token,
                fuse_unk=recipe.byte_fallback,
                byte_fallback=recipe.byte_fallback,
                ignore_merges=recipe.ignore_merges,
            )
    except BaseException as error:
        _pass_others_on(error)
        raise CheckpointFormatError(f"{recipe.source}: the tokenizer cannot be built: {_one_line(error)}") from error
    _add(backend, recipe.added_tokens)
    return FastTokenizer(backend, recipe.settings, source=recipe.source)


class FastTokenizer:
    """A `tokenizers.Tokenizer` with the settings that its model's other files give."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings, *, source: str) -> None:
        """`source`: the file that it was made from, for messages."""
        self._backend, self._source = backend, source
        self._settings = settings
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the named special tokens, by role."""
        return self._settings.special_tokens

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources by name."""
        return self._settings.chat_templates

    @property
    def chat_template(self) -> str | None:
        """The default chat template."""
        return self._settings.chat_templates.get(DEFAULT_TEMPLATE)

    @cached_property
    def decoding(self) -> Decoding:
        """How pieces become text, from the decoder's own JSON."""
        decoder = self._backend.decoder
        return decoding_from_json(None if decoder is None else json.loads(decoder.__getstate__()))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Raises StreamingError for text that is not Unicode (lone surrogates), and
        CheckpointFormatError where the tokenizer contradicts itself, which shows only here."""
        own_ends = self._settings.add_bos is None and self._settings.add_eos is None
        try:
            with without_panic_text():
                ids = self._backend.encode(text, add_special_tokens=add_special_tokens and own_ends).ids
        except TypeError as error:
            raise StreamingError("the text holds bytes that are not UTF-8; give it as valid UTF-8") from error
        except BaseException as error:
            _pass_others_on(error)
            raise CheckpointFormatError(f"{self._source}: cannot encode a text: {_one_line(error)}") from error
        return self._with_ends(ids) if add_special_tokens and not own_ends else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `ids`; ids that are not in the vocabulary have none."""
        try:
            with without_panic_text():
                return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            _pass_others_on(error)
            raise CheckpointFormatError(f"{self._source}: cannot decode token ids: {_one_line(error)}") from error

    def piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self._backend.id_to_token(token_id)

    def token_id(self, piece: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        return self._backend.token_to_id(piece)

    def _named_id(self, role: str) -> int | None:
        text = self._settings.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)

    def _with_ends(self, ids: list[int]) -> list[int]:
        """`ids` with the ends that the settings ask for: a set flag replaces the post-processor, as in transformers."""
        if self._settings.add_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if self._settings.add_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids


def _add(backend: tokenizers.Tokenizer, specs: Sequence[AddedTokenSpec]) -> None:
    """Add tokens; those that the vocabulary has keep their ids."""
    backend.add_tokens(
        [
            AddedToken(
                spec.content,
                special=spec.special,
                normalized=spec.normalized,
                lstrip=spec.lstrip,
                rstrip=spec.rstrip,
                single_word=spec.single_word,
            )
            for spec in specs
        ]
    )


def _pass_others_on(error: BaseException) -> None:
    """Raise what is not the package's own: it raises plain Exception, and its panics are no Exception at all."""
    if not isinstance(error, Exception) and not is_panic(error):
        raise error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
