"""The proxy that stands between here and a server, by the environment variables that other programs go by too.

HTTPS_PROXY, HTTP_PROXY and ALL_PROXY, in small letters first; NO_PROXY lists the hosts that are asked without one. A
request for an http address is put to the proxy whole; for https the proxy connects us (RFC 9110, 9.3.6), and what
passes is encrypted as always. [no-torch]
"""

from __future__ import annotations

import base64
import http.client
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from streaming.errors import OptionError

_DEFAULT_PORT = 80
_REFUSED = "Tunnel connection failed:"  # how http.client's error begins


@dataclass(frozen=True)
class Proxy:
    """A proxy as its variable gives it; `authorization` is the header's value."""

    host: str
    port: int
    authorization: str | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """What it is told with each request, and nobody else."""
        return {} if self.authorization is None else {"Proxy-Authorization": self.authorization}


def proxy_for(scheme: str, host: str, port: int) -> Proxy | None:
    """The proxy for a server's address; None where it is asked itself. Raises OptionError for a variable that names
    none that can be used."""
    proxies = getproxies_environment()
    named = proxies.get(scheme) or proxies.get("all")
    if named is None or proxy_bypass(f"{host}:{port}", proxies):
        return None
    return _parse(named, variable=f"{(scheme if proxies.get(scheme) else 'all').upper()}_PROXY")


def tunnel(host: str, port: int, *, proxy: Proxy, timeout_s: float) -> http.client.HTTPSConnection:
    """A connection to an https server by way of the proxy, not opened yet."""
    connection = http.client.HTTPSConnection(proxy.host, proxy.port, timeout=timeout_s)
    connection.set_tunnel(host, port, headers={"Host": f"{host}:{port}", **proxy.headers})
    return connection


def tunnel_fault(error: OSError) -> str | None:
    """What the proxy answered in place of connecting us, where that is what the error says."""
    words = str(error)
    return words.removeprefix(_REFUSED).strip() if words.startswith(_REFUSED) else None


def _parse(text: str, *, variable: str) -> Proxy:
    shown = f"{variable} names no proxy that can be used"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port or _DEFAULT_PORT
    except ValueError as error:
        raise OptionError(f"{shown}: {error}") from None
    if parts.scheme != "http":
        raise OptionError(f"{shown}: {parts.scheme}:// is not spoken to a proxy, only http://")
    if not host or not text.isprintable():
        raise OptionError(f"{shown}: host:port is needed")
    user = None if parts.username is None else f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    authorization = None if user is None else f"Basic {base64.b64encode(user.encode()).decode()}"
    return Proxy(host, port, authorization)
