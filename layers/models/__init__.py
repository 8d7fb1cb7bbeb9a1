"""The families: a file each, which translates configuration keys and weight names and defines no module.

To add one, write the file and name its FAMILY here.
"""

from __future__ import annotations

from layers.family import Family
from layers.models import (
    cohere,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    gpt2,
    granite,
    llama,
    mistral,
    olmo2,
    phi,
    phi3,
    qwen2,
    qwen3,
    stablelm,
)  # fmt: skip

FAMILIES: tuple[Family, ...] = (
    cohere.FAMILY, gemma.FAMILY, gemma2.FAMILY, gemma3.FAMILY, glm.FAMILY, glm4.FAMILY, gpt2.FAMILY, granite.FAMILY,
    llama.FAMILY, mistral.FAMILY, olmo2.FAMILY, phi.FAMILY, phi3.FAMILY, qwen2.FAMILY, qwen3.FAMILY, stablelm.FAMILY,
)  # fmt: skip
