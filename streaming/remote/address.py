"""Addresses of models on servers: which there are, and how a folder's address becomes that of its files. [no-torch]"""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit

from streaming.errors import OptionError

HTTP_SCHEMES = ("http", "https")
STORE_SCHEMES = ("s3", "gs", "az")
SCHEMES = (*HTTP_SCHEMES, *STORE_SCHEMES)
GGUF_SUFFIX = ".gguf"
REMOTE_KINDS = (
    "a remote model is a folder of config.json and safetensors files, one .safetensors file beside its config.json, or "
    "a .gguf file"
)
_LOCAL_SUFFIXES = (".bin", ".pt", ".pth", ".tensors", ".json")
_HUB_HOST = "huggingface.co"
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")


def is_address(model: str) -> bool:
    """Whether the name begins with a scheme: `anything://`."""
    return _ADDRESS.match(model) is not None


def check_address(model: str) -> str:
    """The address of a folder or of one .safetensors or .gguf file, as it was given. Raises OptionError in words."""
    found = _ADDRESS.match(model)
    if found is None:
        raise OptionError(f"{model!r} is not an address; addresses begin with {', '.join(f'{s}://' for s in SCHEMES)}")
    scheme = found["scheme"].lower()
    if scheme == "file":
        raise OptionError(f"{model}: local files are given by their path, without file://")
    if scheme not in SCHEMES:
        raise OptionError(f"{model}: {scheme}:// is not supported; known are {', '.join(f'{s}://' for s in SCHEMES)}")
    _check_parts(model)
    if model.endswith(_LOCAL_SUFFIXES):
        raise OptionError(f"{model}: cannot be read from a server: {REMOTE_KINDS}; download the others")
    return scheme + model[len(scheme) :]


def _check_parts(model: str) -> None:
    try:
        parts = urlsplit(model)
        port = parts.port
    except ValueError as error:
        raise OptionError(f"{model!r} is not a valid address: {error}") from None
    if "@" in parts.netloc:
        raise OptionError(
            f"{parts.scheme}://...@{parts.hostname}: credentials do not belong into an address; "
            "give them in the environment (FIRSTLAYER_HTTP_AUTHORIZATION for http and https)"
        )
    page = parts.path.strip("/")
    if parts.hostname == _HUB_HOST and page.count("/") == 1:  # a folder of files would be .../resolve/main/
        raise OptionError(f"{model}: is a model's page; give its name on the hub, {page}")
    if not parts.hostname or port == 0:
        raise OptionError(f"{model}: the address names no host" + (" or bucket" if port is None else " and port"))
    if parts.query or parts.fragment:
        raise OptionError(f"{model}: an address with a query (?) or a fragment (#) names no folder or file")
    if not model.isprintable() or " " in model:
        raise OptionError(f"{model!r}: an address holds no spaces or control characters; write them as %20")


def is_file_address(url: str) -> bool:
    """Whether the address names one weights file and not a folder."""
    return url.endswith((".safetensors", GGUF_SUFFIX))


def folder_of(url: str) -> str:
    """The folder's address, ending in "/": of the folder itself, or around the file."""
    return url.rpartition("/")[0] + "/" if is_file_address(url) else url.rstrip("/") + "/"


def member_url(folder: str, name: str) -> str:
    """The address of a file in the folder; `name` may hold "/"."""
    return folder + quote(name)
