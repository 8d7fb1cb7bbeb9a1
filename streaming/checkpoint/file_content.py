"""What kind of file it is by its first bytes, whatever its name says. [no-torch]"""

from __future__ import annotations

ZIP, LEGACY, TAR, GGUF_FILE, SAFETENSORS_FILE = "zip", "legacy", "tar", "gguf", "safetensors"
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch's magic number, pickled, after the protocol (and a frame)
_TAR_MAGIC, _TAR_AT = b"ustar", 257


def kind_of(start: bytes, size: int) -> str | None:
    """The kind by the first bytes (512 are enough) of a file of `size` bytes; None for any other."""
    if start.startswith(b"PK\x03\x04"):
        return ZIP
    if start[:1] == b"\x80" and _LEGACY_MAGIC in start[:32]:
        return LEGACY
    if start[_TAR_AT:].startswith(_TAR_MAGIC):
        return TAR
    if start.startswith(b"GGUF"):
        return GGUF_FILE
    if start[8:9] == b"{" and 8 + int.from_bytes(start[:8], "little") <= size:
        return SAFETENSORS_FILE
    return None
