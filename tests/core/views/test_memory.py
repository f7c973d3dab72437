"""What an owner remembers, and what a view's function may give (V1, V6)."""

from __future__ import annotations

from typing import Any

import pytest

import perco
from perco import views
from perco.views.memory import Memory, given

T, OTHER = perco.Table("t", key=perco.TEXT), perco.Table("other", key=perco.TEXT)
N, S = T.column("n", perco.INT64), T.column("s", perco.TEXT)
OUTSIDE = OTHER.column("n", perco.INT64)
OUTPUTS = {T: frozenset([N, S])}


def digest(**values: Any) -> bytes | None:
    found = given("v", [views.Put(T, "k", {T.columns[name]: value for name, value in values.items()})], OUTPUTS)
    return found["t", b"k"].digest if found else None


def test_a_memory_survives_storage() -> None:
    memory = Memory(3, 17, {"t": ("n", "s"), "u": ("x",)}, {("t", b"a"): b"1" * 16, ("u", b""): b"2" * 16})
    assert Memory.unpack(memory.pack()) == memory
    assert Memory.unpack(None) == Memory()


def test_a_digest_is_of_the_values_and_their_columns() -> None:
    all_different = [digest(n=1), digest(n=2), digest(s="1"), digest(n=1, s="1"), digest(s="")]
    assert len(set(all_different)) == len(all_different)
    assert digest(n=1, s=None) == digest(n=1)
    assert digest(s="a", n=1) == digest(n=1, s="a")


def test_a_row_without_values_is_not_given() -> None:
    assert digest(n=None, s=None) is None


@pytest.mark.parametrize(
    ("puts", "match"),
    [
        ([("k", 1)], "views.Put"),
        ([views.Put(OTHER, "k", {OUTSIDE: 1})], "into= does not name"),
        ([views.Put(T, "k", {OUTSIDE: 1})], "into= does not name"),
        ([views.Put(T, "k", {N: 1}), views.Put(T, "k", {N: 1})], "twice in one run"),
    ],
)
def test_what_cannot_be_given(puts: list[Any], match: str) -> None:
    with pytest.raises(perco.UsageError, match=match):
        given("v", puts, OUTPUTS)


@pytest.mark.parametrize("value", ["1", 1.5, True])
def test_a_value_of_the_wrong_type_names_its_column(value: object) -> None:
    with pytest.raises(TypeError, match=r"value of t\.n"):
        given("v", [views.Put(T, "k", {N: value})], OUTPUTS)
