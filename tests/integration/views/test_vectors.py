"""The sink that finds the nearest vectors."""

from __future__ import annotations

import random
import sqlite3
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import perco
from perco import views
from perco.views import Delivered, VectorTable
from tests.support.graphs import write

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs


def data(*numbers: float) -> bytes:
    return array("f", numbers).tobytes()


class Points:
    """A table of points, and a sink that finds them."""

    def __init__(self, path: Path | str, **how: Any) -> None:
        self.table = perco.Table("points", key=perco.Tuple(perco.TEXT, perco.INT64))
        self.at, self.name = self.table.column("at", perco.BYTES), self.table.column("name", perco.TEXT)
        self.views = views.Views(perco.Schema(self.table))
        self.to = VectorTable(path, **{"vector": "at", **how})
        self.views.sink(self.at, self.name, id="out", to=self.to)


def row(key: str, version: int, *numbers: float, name: str = "") -> Delivered:
    return Delivered((key, 0), {"at": data(*numbers), "name": name} if numbers else None, version)


def keys(to: VectorTable, vector: Sequence[float], k: int = 10) -> str:
    return "".join(hit.key[0] for hit in to.search(vector, k))


def test_the_nearest_rows_come_first(tmp_path: Path) -> None:
    to = Points(tmp_path / "v.db").to
    to.deliver([row("a", 1, 1, 0, name="east"), row("b", 1, 0, 3, name="north"), row("c", 1, -1, 0), row("d", 1, 2, 2)])
    assert keys(to, [2, 0.1]) == "adbc"
    first, second = to.search(data(0, 5), 2)
    assert (first.key, first.values["name"], second.key) == (("b", 0), "north", ("d", 0))
    assert first.likeness == pytest.approx(1.0)
    assert second.likeness == pytest.approx(0.5**0.5)


def test_the_dot_product_may_count(tmp_path: Path) -> None:
    to = Points(tmp_path / "v.db", metric="dot").to
    to.deliver([row("a", 1, 1, 0), row("b", 1, 0.5, 9), row("c", 1, 3, 0)])
    assert [(hit.key[0], hit.likeness) for hit in to.search([2, 0])] == [("c", 6.0), ("a", 2.0), ("b", 1.0)]


def test_a_search_sees_what_others_have_delivered(tmp_path: Path) -> None:
    one, other = Points(tmp_path / "v.db").to, Points(tmp_path / "v.db").to
    one.deliver([row(key, 1, number, 1) for number, key in enumerate("abc")])
    assert keys(other, [0, 1]) == "abc"
    one.deliver([row("a", 2), row("b", 2, -5, 1), row("d", 1, 0.1, 1), row("c", 1, 0, 7)])  # the last is not newer
    assert keys(other, [0, 1]) == "dcb"
    assert keys(one, [0, 1], 1) == "d"
    one.deliver([row("d", 3)])
    assert one.forget(10) == 2  # before the other process has seen that d is gone
    assert keys(other, [0, 1]) == "cb"


def test_rows_without_a_vector_are_not_found(tmp_path: Path) -> None:
    to = Points(tmp_path / "v.db").to
    assert to.search([1.0]) == []
    to.deliver([Delivered(("a", 0), {"name": "nowhere"}, 1), row("b", 1, 1, 1)])
    assert keys(to, [1, 0]) == "b"
    to.deliver([Delivered(("b", 0), {"name": "nowhere"}, 2), row("z", 1, 0, 0)])
    assert [(hit.key[0], hit.likeness) for hit in to.search([1, 0])] == [("z", 0.0)]


def test_vectors_of_several_lengths_may_stand_side_by_side(tmp_path: Path) -> None:
    to = Points(tmp_path / "v.db").to
    to.deliver([row("a", 1, 1, 0), row("b", 1, 1, 1)])
    with pytest.raises(perco.UsageError, match="a vector of 3 numbers, and those of the rows have 2"):
        to.search([1, 2, 3])
    to.deliver([row("b", 2, 0, 0, 1)])
    assert (keys(to, [1, 0]), keys(to, [1, 1, 1])) == ("a", "b")
    to.deliver([row("a", 2, 0, 1, 0)])
    with pytest.raises(perco.UsageError, match="a vector of 2 numbers, and those of the rows have 3"):
        to.search([1, 0])
    to.deliver([row("a", 3), row("b", 3)])
    assert to.search([1, 0]) == []


@pytest.mark.parametrize(
    ("vector", "says"),
    [
        (b"abc", "has 3 bytes, which are no 32-bit numbers"),
        (b"", "has no numbers"),
        (data(1, float("nan")), "has a number that is not finite"),
        (data(1, float("inf")), "has a number that is not finite"),
    ],
)
def test_what_is_no_vector_is_not_stored(tmp_path: Path, vector: bytes, says: str) -> None:
    to = Points(tmp_path / "v.db").to
    with pytest.raises(perco.StoreError, match=rf"the vector of row \('b', 0\) {says}"):
        to.deliver([row("a", 1, 1), Delivered(("b", 0), {"at": vector}, 1)])
    with pytest.raises(perco.UsageError, match=f"a vector that {says}"):
        to.search(vector)


@pytest.mark.parametrize("vector", ["ab", [1, "x"], [[1.0]], 5])
def test_a_question_that_is_no_vector_is_refused(tmp_path: Path, vector: Any) -> None:
    with pytest.raises(perco.UsageError, match="search: a vector that"):
        Points(tmp_path / "v.db").to.search(vector)


def test_very_large_and_very_small_numbers(tmp_path: Path) -> None:
    to = Points(tmp_path / "v.db").to
    to.deliver([row("a", 1, 1e25, 1e25), row("b", 1, 1e-30, 1e-30)])
    for hit in to.search(bytearray(data(1, 1))):
        assert hit.likeness == pytest.approx(1.0)


def test_rows_come_after_others_were_forgotten(tmp_path: Path) -> None:
    one, other = Points(tmp_path / "v.db").to, Points(tmp_path / "v.db").to
    one.deliver([row("a", 1, 1, 0), row("b", 1, 1, 1)])
    assert keys(other, [1, 0]) == "ab"
    one.deliver([row("b", 2)])
    assert keys(other, [1, 0]) == "a"
    assert one.forget(10) == 1
    one.deliver([row("c", 1, 1, 0.5), row("a", 2, 0, 1)])
    assert keys(other, [1, 0]) == "ca"


def test_another_file_in_its_place_is_read_again(tmp_path: Path) -> None:
    to = Points(tmp_path / "v.db").to
    to.deliver([row("a", 1, 1, 0), row("b", 1, 1, 1)])
    assert keys(to, [1, 0]) == "ab"
    to.close()
    for file in tmp_path.glob("v.db*"):
        file.unlink()
    to.deliver([row("c", 1, 1, 0)])
    assert keys(to, [1, 0]) == "c"
    with sqlite3.connect(tmp_path / "v.db") as db:  # as the error for a table with other columns says
        db.executescript("DROP TABLE points_rows; DROP VIEW points")
    to.close()
    to.deliver([row("d", 1, 1, 0)])
    assert keys(to, [1, 0]) == "d"


def test_the_sink_is_declared_first(tmp_path: Path) -> None:
    with pytest.raises(perco.UsageError, match="declare the sink before you search"):
        VectorTable(tmp_path / "v.db", vector="at").search([1.0])


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(perco.UsageError, match="metric is"):
        VectorTable(tmp_path / "v.db", vector="at", metric="manhattan")  # type: ignore[arg-type]
    with pytest.raises(perco.UsageError, match="vector= names a column of BYTES, not 'name'"):
        Points(tmp_path / "v.db", vector="name")
    with pytest.raises(perco.UsageError, match="k is a number of rows"):
        Points(tmp_path / "v.db").to.search([1], 0)


def test_a_table_of_a_plain_sink_is_told(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "v.db") as db:
        db.execute("CREATE TABLE points_rows (key1, key2, at, name, perco_version, perco_gone)")
    with pytest.raises(perco.StoreError, match="has no column 'perco_sequence'"):
        Points(tmp_path / "v.db").to.deliver([row("a", 1, 1)])


def test_numpy_is_named_if_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(perco.UsageError, match=r"needs numpy: pip install 'perco\[vectors\]'"):
        Points(tmp_path / "v.db").to.search([1.0])


@given(st.integers(0, 1 << 32))
@settings(max_examples=30, deadline=None)
def test_random_deliveries_equal_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    one = Points(":memory:").to
    there: dict[str, tuple[float, float]] = {}
    versions: dict[str, int] = {}
    for _ in range(rng.randrange(1, 12)):
        some = []
        for _ in range(rng.randrange(1, 90)):
            key, version = f"{rng.randrange(100):02}", rng.randrange(1, 50)
            at = (rng.uniform(-1, 1), rng.uniform(-1, 1))
            gone = rng.random() < 0.3
            some.append(Delivered((key, 0), None if gone else {"at": data(*at)}, version))
            if version > versions.get(key, 0):
                versions[key] = version
                there.pop(key, None)
                there.update({} if gone else {key: at})
        one.deliver(some)
        angle = (rng.uniform(-1, 1), rng.uniform(-1, 1))
        found = one.search(angle, 200)
        assert {hit.key[0] for hit in found} == there.keys()
        for hit in found:
            x, y = there[hit.key[0]]
            length = (x * x + y * y) ** 0.5 * (angle[0] ** 2 + angle[1] ** 2) ** 0.5
            assert hit.likeness == pytest.approx((x * angle[0] + y * angle[1]) / length, abs=1e-4)
        assert [hit.likeness for hit in found] == sorted((hit.likeness for hit in found), reverse=True)
        assert one.search(angle, 3) == found[:3]
    one.close()


async def test_it_follows_its_table(tmp_path: Path) -> None:
    points = Points(tmp_path / "v.db")
    async with perco.open(tmp_path / "s", points.views.schema) as db, db.worker():
        await write(db, [(points.at, ("a", 1), data(1, 0)), (points.at, ("b", 1), data(0, 1))])
        await db.wait_idle(timeout=60)
        assert keys(points.to, [1, 0.1]) == "ab"
        await write(db, [(points.at, ("a", 1), None)])
        await db.wait_idle(timeout=60)
        assert keys(points.to, [1, 0.1]) == "b"
        async with db.snapshot() as snap:
            assert (await views.check(points.views, snap)).rows == {"out": 1}
