"""Who may see the page of `perco ui`."""

from __future__ import annotations

import pytest

from perco.cli.ui.guard import Guard

TOKEN = "x" * 32
COOKIE = Guard(TOKEN, 7430, tls=False).set_cookie().partition(";")[0]


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, False),
        ({"cookie": COOKIE}, True),
        ({"cookie": f"other=1; {COOKIE}"}, True),
        ({"cookie": f"{COOKIE}x"}, False),
        ({"cookie": f"perco-ui-7430={TOKEN}"}, False),  # browsers send cookies to all ports of a host
        *(({"cookie": f"{other}; {COOKIE}"}, True) for other in ("x={", "a=b c", "flag", "a[b]=1", 'a="x', "k=é", "")),
        ({"cookie": "perco-ui-7430="}, False),
        ({"cookie": Guard(TOKEN, 7431, tls=False).set_cookie().replace("7431", "7430")}, False),  # another page's
        ({"cookie": "\x00; ="}, False),
        ({"authorization": f"Bearer {TOKEN}"}, True),
        ({"authorization": f"bearer {TOKEN}"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": f"Bearer {TOKEN[:-1]}é"}, False),
        ({"host": "localhost:7430"}, False),
    ],
)
def test_a_request_needs_the_token(headers: dict[str, str], allowed: bool) -> None:
    assert Guard(TOKEN, 7430, tls=False).lets_in(headers) == allowed


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost:7430", True),
        ("localhost", True),
        ("127.0.0.1:7430", True),
        ("127.9.9.9", True),
        ("[::1]:7430", True),
        ("evil.example:7430", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_without_a_token_a_request_must_name_this_host(host: str, allowed: bool) -> None:  # DNS rebinding
    assert Guard("", 7430, tls=False).lets_in({"host": host}) == allowed


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"host": "localhost:7430"}, True),  # curl
        ({"host": "localhost:7430", "origin": "http://localhost:7430"}, True),
        ({"host": "localhost:7430", "origin": "http://localhost:7430", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost:7430", "origin": "http://localhost:9999"}, False),
        ({"host": "localhost:7430", "origin": "http://localhost:9999", "sec-fetch-site": "same-site"}, False),
        ({"host": "localhost:7430", "sec-fetch-site": "cross-site"}, False),
        ({"host": "localhost:7430", "origin": "null"}, False),
        ({"host": "proxied", "origin": "https://perco.example", "sec-fetch-site": "same-origin"}, True),
        ({"host": "localhost:7430", "origin": "http://[::1"}, False),
    ],
)
def test_only_the_page_itself_may_act(headers: dict[str, str], allowed: bool) -> None:  # CSRF
    assert Guard(TOKEN, 7430, tls=False).is_from_page(headers) == allowed


def test_the_cookie_is_not_for_scripts_nor_for_other_sites() -> None:
    assert Guard(TOKEN, 7430, tls=False).set_cookie() == f"{COOKIE}; Path=/; HttpOnly; SameSite=Lax"
    assert TOKEN not in COOKIE
    assert Guard(TOKEN, 7430, tls=True).set_cookie().endswith("; Secure")
