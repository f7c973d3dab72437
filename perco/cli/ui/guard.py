"""Decides which requests to the page of `perco ui` are answered.

The page shows data, and can act. Every request needs the token that the command printed, in a cookie that the link with
the token sets, or as `Authorization: Bearer`. On loopback one may do without the token; then requests must name this
host, so that no other site can have a browser ask here under its own name (DNS rebinding). Requests that act must come
from the page itself, not from another site (CSRF).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from perco.rpc.addresses import Address

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_BEARER: Final = "Bearer "


class Guard:
    """Decides about requests.

    Args:
        token: what requests must present; "": nothing.
        cookie: the name of the cookie; it has the port, because cookies do not tell ports apart.
    """

    token: str
    cookie: str

    def __init__(self, token: str, port: int, *, tls: bool) -> None:
        self.token, self.cookie, self._tls = token, f"perco-ui-{port}", tls
        # Browsers send a cookie to all ports of a host, so its value lets in with this cookie only.
        self._key = hashlib.blake2b(self.cookie.encode(), key=token.encode()[:64], digest_size=24).hexdigest()

    def is_token(self, given: str) -> bool:
        """Whether this is the token."""
        return _same(given, self.token)

    def lets_in(self, headers: Mapping[str, str]) -> bool:
        """Whether a request with these headers may see the page."""
        if not self.token:
            return _names_loopback(headers.get("host", ""))
        given = headers.get("authorization", "")
        if given.startswith(_BEARER) and self.is_token(given.removeprefix(_BEARER)):
            return True
        # Other programs on this host may have set cookies of any form.
        pairs = [each.strip().partition("=") for each in headers.get("cookie", "").split(";")]
        return any(name == self.cookie and _same(value, self._key) for name, _, value in pairs)

    def is_from_page(self, headers: Mapping[str, str]) -> bool:
        """Whether a request that acts comes from the page, or from no browser."""
        if "sec-fetch-site" in headers:
            return headers["sec-fetch-site"] in ("same-origin", "none")
        origin = headers.get("origin")
        return origin is None or (bool(host := headers.get("host", "")) and origin.partition("://")[2] == host)

    def set_cookie(self) -> str:
        """The value of a Set-Cookie header that lets a browser in."""
        secure = "; Secure" if self._tls else ""
        return f"{self.cookie}={self._key}; Path=/; HttpOnly; SameSite=Lax{secure}"


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _names_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return Address(None, name, 0).on_this_host
