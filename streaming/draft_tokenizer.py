"""Whether a draft model's tokens mean what its model's do. [no-torch]

What is compared is what counts: the ids of a few texts. The size of a vocabulary proves nothing.
"""

from __future__ import annotations

import filecmp
from typing import TYPE_CHECKING

from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import OptionError, StreamingError
from streaming.tokenizer import Tokenizer, open_tokenizer

if TYPE_CHECKING:
    from streaming.prepare import Prepared

_TEXTS = (
    "The sea is 1234567890 metres deep, isn't it?",
    "  two  spaces,\n\ta tab\n\nand   more",
    "Größe, café; 海は広い; привет, мир; 🌊",
    "def area(radius):\n    return 3.14159 * radius ** 2  # unbelievably",
)


def check_tokenizers(draft: Prepared, model: Prepared) -> tuple[str, ...]:
    """Compare them; what the user should know. Raises OptionError where they give other ids for the same text."""
    if _have_same_file(draft.checkpoint, model.checkpoint):
        return ()
    theirs, ours = _opened(draft.checkpoint), _opened(model.checkpoint)
    if ours is None or theirs is None:
        without = " and ".join(one.model for one, found in ((draft, theirs), (model, ours)) if found is None)
        return (f"its tokens are taken to be those of {model.model}: there is no tokenizer in {without} to compare",)
    for text in _TEXTS:
        left, right = (one.encode(text, add_special_tokens=False) for one in (theirs, ours))
        if left != right:
            raise OptionError(
                f"--draft-model {draft.model} has another tokenizer than {model.model} ({_first(left, right)} of "
                f"{text!r}): a model of the same family is needed"
            )
    return ()


def _first(left: list[int], right: list[int]) -> str:
    """Where they part."""
    pairs = enumerate(zip(left, right, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(left), len(right)))
    ids = ("none" if at >= len(found) else str(found[at]) for found in (left, right))
    return f"ids {' and '.join(ids)} at token {at + 1}"


def _have_same_file(left: Checkpoint, right: Checkpoint) -> bool:
    """Whether they are one model, or their tokenizer.json are the same: most pairs need no closer look."""
    if left.name == right.name:
        return True
    try:
        return filecmp.cmp(left.root / "tokenizer.json", right.root / "tokenizer.json", shallow=False)
    except OSError:
        return False


def _opened(checkpoint: Checkpoint) -> Tokenizer | None:
    """None where it has none that can be read: who needs it is told why."""
    try:
        return open_tokenizer(checkpoint)
    except StreamingError:
        return None
