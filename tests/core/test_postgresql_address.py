"""Addresses of stores on PostgreSQL: what libpq is told, and what messages show."""

from __future__ import annotations

import sys

import pytest

from perco.errors import UsageError
from perco.postgresql.address import Place, is_postgresql

pytest.importorskip("psycopg")


@pytest.mark.parametrize(
    ("url", "shown", "told"),
    [
        ("postgresql://db/shop?prefix=web", "postgresql://db/shop?prefix=web", ["host='db'", "dbname='shop'"]),
        ("postgresql:///shop?host=/run/pg", "postgresql:///shop?host=/run/pg&prefix=perco", ["host='/run/pg'"]),
        (
            "postgres://u:s%20cret@a:1,b:2/shop?prefix=web&sslmode=require",
            "postgresql://u@a:1,b:2/shop?prefix=web",
            ["password='s cret'", "host='a,b'", "port='1,2'", "sslmode='require'"],
        ),
        ("postgresql://db/shop?password=a+b&prefix=web", "postgresql://db/shop?prefix=web", ["password='a+b'"]),
        ("postgresql://db/shop?prefix=web&password=it's", "postgresql://db/shop?prefix=web", ["password='it\\'s'"]),
        ("postgresql://db/shop?connect_timeout=9", "postgresql://db/shop?prefix=perco", ["connect_timeout='9'"]),
    ],
)
def test_it_is_read_as_libpq_reads_it_and_shown_without_secrets(url: str, shown: str, told: list[str]) -> None:
    place = Place(url)
    assert is_postgresql(url)
    assert place.shown == shown
    parts = place.conninfo.split("' ")
    assert all(each.removesuffix("'") in [part.removesuffix("'") for part in parts] for each in told)
    assert "target_session_attrs='read-write'" in place.conninfo
    assert "prefix" not in place.conninfo
    assert "cret" not in repr(place)


def test_a_service_has_its_own_settings() -> None:
    assert Place("postgresql://?service=shop&prefix=web").conninfo == "service='shop'"


def test_without_psycopg_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("psycopg", "psycopg.pq"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"pip install 'perco\[postgresql\]'"):
        Place("postgresql://db/shop?prefix=web")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:pw#x@db/shop?prefix=web&unknown=1",
        "postgresql://u:100%sure-pw@db/shop",
        "postgresql://[::1/shop?password=pw",
        "postgresql://u:pw@db",
        "postgresql://u:pw@db/shop?prefix=Web",
        "postgresql://u:pw@db/shop?prefix=x;drop",
    ],
)
def test_what_cannot_be_read_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(UsageError, match="postgresql://USER@HOST/DATABASE") as caught:
        Place(url)
    assert "pw" not in str(caught.value)
