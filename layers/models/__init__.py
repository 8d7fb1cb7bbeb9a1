"""The families: a file each, which translates configuration keys and weight names and defines no module.

To add one, write the file and name its FAMILY here.
"""

from __future__ import annotations

from layers.family import Family
from layers.models import llama, mistral, phi3, qwen2, qwen3

FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, phi3.FAMILY, qwen2.FAMILY, qwen3.FAMILY)
