"""The sink in a folder of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import perco
import perco.sync
from perco import views
from perco.views import Delivered, Files
from perco.views.files import _Folder
from tests.integration.views import sinks
from tests.support.graphs import write

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs

PAIR = perco.Tuple(perco.TEXT, perco.INT64)


class Pages:
    """A table with one column, and a sink in a folder."""

    def __init__(self, path: Path, key: Any = perco.TEXT, codec: Any = perco.TEXT, suffix: str = ".md") -> None:
        self.table: Any = perco.Table("pages", key=key)
        self.text = self.table.column("text", codec)
        self.views = views.Views(perco.Schema(self.table))
        self.to = Files(path, suffix=suffix)
        self.views.sink(self.text, id="out", to=self.to)

    def change(self, txn: perco.Transaction, number: int) -> None:
        txn.set(self.text, ("a", number % 50), str(number))
        if number % 3 == 0:
            txn.delete(self.text, ("a", (number + 7) % 50))


def in_folder(folder: Path) -> Pages:
    return Pages(folder / "out", PAIR)


def tree(path: Path) -> dict[str, bytes]:
    """The files of a folder, without those of perco."""
    found = {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}
    return {name: data for name, data in found.items() if not name.startswith(".perco/")}


def row(key: Any, text: Any, version: int) -> Delivered:
    return Delivered(key, None if text is None else {"text": text}, version)


async def test_files_follow_their_table(tmp_path: Path) -> None:
    pages = Pages(tmp_path / "out", PAIR)
    async with perco.open(tmp_path / "s", pages.views.schema) as db, db.worker():
        await write(
            db, [(pages.text, ("a/b", 1), "one"), (pages.text, ("a/b", 2), "two"), (pages.text, ("c", -3), "ü")]
        )
        await db.wait_idle(timeout=60)
        assert tree(tmp_path / "out") == {"a%2Fb/1.md": b"one", "a%2Fb/2.md": b"two", "c/-3.md": "ü".encode()}
        async with db.snapshot() as snap:
            assert (await views.check(pages.views, snap)).rows == {"out": 3}
        await write(db, [(pages.text, ("a/b", 1), "ONE"), (pages.text, ("c", -3), None)])
        await db.wait_idle(timeout=60)
        assert tree(tmp_path / "out") == {"a%2Fb/1.md": b"ONE", "a%2Fb/2.md": b"two"}
        assert not (tmp_path / "out/c").exists(), "a folder without files is removed"
        (tmp_path / "out/a%2Fb/1.md").write_text("changed by hand")
        (tmp_path / "out/a%2Fb/2.md").unlink()
        async with db.snapshot() as snap:
            assert (await views.check(pages.views, snap)).count == 2


@pytest.mark.parametrize(
    ("codec", "value", "data"),
    [
        (perco.TEXT, "tëxt\n", "tëxt\n".encode()),
        (perco.BYTES, b"\x00\xff", b"\x00\xff"),
        (perco.JSON, {"a": [1, None, "ü"]}, '{"a": [1, null, "ü"]}'.encode()),
    ],
    ids=["text", "bytes", "json"],
)
def test_values_of_each_kind_come_back_as_they_were(tmp_path: Path, codec: Any, value: Any, data: bytes) -> None:
    to = Pages(tmp_path / "out", codec=codec).to
    to.deliver([row("k", value, 1)])
    assert (list(to.rows()), tree(tmp_path / "out")) == ([row("k", value, 1)], {"k.md": data})
    (tmp_path / "out/k.md").write_bytes(b"\xff{")  # by hand: the row that is read differs, and is no error
    assert list(to.rows()) != [row("k", value, 1)]


def test_a_row_is_replaced_by_newer_ones_only(tmp_path: Path) -> None:  # V11
    to = Pages(tmp_path / "out").to
    to.deliver([row("a", "2", 20), row("a", "1", 10)])
    to.deliver([row("a", "1", 10), row("b", None, 10)])
    assert list(to.rows()) == [row("a", "2", 20)]
    to.deliver([row("a", None, 30), row("b", "9", 5)])  # it was gone later than this
    assert (list(to.rows()), tree(tmp_path / "out")) == ([], {})
    to.deliver([row("a", "1", 25)])
    assert tree(tmp_path / "out") == {}
    assert to.forget(30) == 1
    to.deliver([row("b", "9", 5)])
    assert (list(to.rows()), to.count()) == ([row("b", "9", 5)], 1)
    to.close()
    to.close()
    assert list(to.rows()) == [row("b", "9", 5)]


def test_many_rows_are_read_in_parts(tmp_path: Path) -> None:
    to = Pages(tmp_path / "out", perco.INT64).to
    rows = [row(number, str(number), 1) for number in range(-150, 150)]
    to.deliver(rows)
    found = to.rows()
    assert next(found) == rows[0]
    to.deliver([row(-149, "new", 2)])  # a reader does not hold up deliveries
    assert list(found) == rows[1:]


class Ended(BaseException):
    pass


CALLS = ("replace", "unlink", "fsync", "open", "mkdir", "rmdir")


@pytest.mark.parametrize("first", ["redelivered", "an older one", "a newer one"])
def test_a_delivery_that_ends_at_any_call_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:  # SF1
    """The first delivery after a process has died: then all of it is delivered again."""
    stops = 0
    while True:
        stops += 1
        path = tmp_path / f"stop {stops}"
        to = Pages(path, PAIR).to
        to.deliver([row(("a", 1), "old", 10), row(("b", 1), "old", 10), row(("c", 1), None, 10)])
        delivery = [row(("a", 1), "new", 20), row(("b", 1), None, 20), row(("c", 1), "new", 20)]
        left = stops

        def counted(name: str, real: Any) -> Any:
            def call(*args: Any, **how: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    raise Ended(name)
                return real(*args, **how)

            return call

        with monkeypatch.context() as patched:
            for name in CALLS:
                patched.setattr(os, name, counted(name, getattr(os, name)))
            patched.setattr(_Folder, "_note", counted("note", _Folder._note))
            try:
                to.deliver(delivery)
                ended = True
            except Ended:
                ended = False
        to.close()
        to = Pages(path, PAIR).to
        if first == "an older one":
            before = tree(path)
            to.deliver([row(("a", 1), "older", 15), row(("b", 1), "older", 15)])
            after = tree(path)
            for name, new in (("a/1.md", b"new"), ("b/1.md", None)):
                assert before.get(name) != new or after.get(name) == new, "an older row never replaces a newer one"
        newer = first == "a newer one"
        if newer:
            to.deliver([row(("a", 1), "newer", 30)])
        to.deliver(delivery)
        assert tree(path) == {"a/1.md": b"newer" if newer else b"new", "c/1.md": b"new"}, stops
        assert [(each.key, each.version) for each in to.rows()] == [(("a", 1), 30 if newer else 20), (("c", 1), 20)]
        inode = (path / "c/1.md").stat().st_ino
        to.deliver(delivery)
        assert (path / "c/1.md").stat().st_ino == inode, "a file that is there is not written again"
        assert to.forget(25) == 1
        if ended:
            break
    assert stops > 20


def test_a_row_that_is_being_removed_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # SF1
    to = Pages(tmp_path / "out").to
    to.deliver([row("a", "one", 1)])

    def end(*args: Any, **how: Any) -> None:
        raise Ended

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", end)
        with pytest.raises(Ended):
            to.deliver([row("a", None, 2)])
    assert (to.forget(3), tree(tmp_path / "out")) == (0, {"a.md": b"one"})
    to.deliver([row("a", None, 2)])
    assert (to.forget(3), tree(tmp_path / "out")) == (1, {})


def test_what_has_changed_is_durable_when_a_delivery_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def fsync(handle: int) -> None:
        order.append(f"{os.fstat(handle).st_ino}")

    def replace(*args: Any, **how: Any) -> None:
        order.append("put")
        real_replace(*args, **how)

    def note(*args: Any) -> None:
        order.append("note")
        real_note(*args)

    real_replace, real_note = os.replace, _Folder._note
    to = Pages(tmp_path / "out", PAIR).to
    assert to.count() == 0
    for name, call in (("fsync", fsync), ("replace", replace)):
        monkeypatch.setattr(os, name, call)
    monkeypatch.setattr(_Folder, "_note", note)
    to.deliver([row(("a", 1), "one", 1)])
    file, folder, root = (str((tmp_path / "out" / each).stat().st_ino) for each in ("a/1.md", "a", ""))
    assert order == [file, "note", "put", root, folder, "note"]
    order.clear()
    to.deliver([row(("a", 1), None, 2)])
    assert order == ["note", root, "note"]


@given(st.text(st.characters(codec="utf-8"), max_size=20), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=20))
def test_names_are_safe_and_lead_back_to_their_keys(text: str, number: int, data: bytes) -> None:
    to = Pages(Path("none"), perco.Tuple(perco.TEXT, perco.INT64, perco.BYTES, perco.TEXT)).to
    for key in ((text, number, data, text), ("", 0, b"", "")):
        name = to.name_of(key)
        assert to.key_of(name) == key
        parts = name.split("/")
        assert len(parts) == 4
        for part in parts:
            assert part.isprintable()
            assert part
            assert not part.startswith(".")
    assert to.name_of((text, number, data, text)) == to.name_of(("", 0, b"", "")) or (text, number, data) != (
        "",
        0,
        b"",
    )


def test_names_that_stand_for_no_row_are_told(tmp_path: Path) -> None:
    to = Pages(tmp_path, PAIR).to
    for name in (
        "a/1",
        "a/1.md.md",
        "a.md",
        "a/b/1.md",
        "a/+1.md",
        "%61/1.md",
        ".a/1.md",
        "/1.md",
        "a/%.md",
        "%FF/1.md",
    ):
        with pytest.raises(ValueError, match="is not the name of a row's file"):
            to.key_of(name)


def test_a_row_whose_name_is_too_long_fails_alone(tmp_path: Path) -> None:
    pages = Pages(tmp_path / "out")
    with pytest.raises(perco.StoreError, match="would have 256 bytes, and 255 are the most"):
        pages.to.deliver([row("x" * 253, "t", 1)])
    pages.to.deliver([row("x" * 252, "t", 1)])
    assert pages.to.count() == 1


def test_nothing_outside_of_the_folder_is_touched(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/1.md").write_text("not ours")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/link").symlink_to(tmp_path / "outside")
    to = Pages(tmp_path / "out", PAIR).to
    for content in ("x", None):
        with pytest.raises(perco.StoreError, match=r"the sink .*out"):
            to.deliver([row(("link", 1), content, 1)])
    to.deliver([row(("..", 1), "up", 1), row(("a", 1), "one", 1), row((".perco", 1), "own", 1)])
    (tmp_path / "out/a/1.md").unlink()
    (tmp_path / "out/a/1.md").symlink_to(tmp_path / "outside/1.md")
    assert [each.key for each in to.rows()] == [("..", 1), (".perco", 1)], "a link is no file"
    to.deliver([row(("a", 1), "two", 2)])
    assert tree(tmp_path / "outside") == {"1.md": b"not ours"}
    (tmp_path / "out/link").unlink()
    assert tree(tmp_path / "out") == {"%2E./1.md": b"up", "a/1.md": b"two", "%2Eperco/1.md": b"own"}


def test_what_others_have_put_there_stays(tmp_path: Path) -> None:
    to = Pages(tmp_path / "out", PAIR).to
    to.deliver([row(("a", 1), "one", 1)])
    (tmp_path / "out/a/mine.txt").write_text("mine")
    (tmp_path / "out/a/2.md").mkdir()
    to.deliver([row(("a", 1), None, 2)])
    assert tree(tmp_path / "out") == {"a/mine.txt": b"mine"}
    with pytest.raises(perco.StoreError, match=r"the sink .*out"):
        to.deliver([row(("a", 2), "two", 3)])
    (tmp_path / "out/a/2.md").rmdir()
    to.deliver([row(("a", 2), "two", 3)])
    assert [each.key for each in to.rows()] == [("a", 2)]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for suffix in ("/x", "a\x00", "%", "a:"):
        with pytest.raises(perco.UsageError, match="a suffix is the end of a file's name"):
            Files(tmp_path, suffix=suffix)
    with pytest.raises(perco.UsageError, match="one column of TEXT, BYTES or JSON"):
        Pages(tmp_path, codec=perco.INT64)
    mine = perco.Codec("mine", str.encode, bytes.decode, ordered=True)
    with pytest.raises(perco.UsageError, match="keys are TEXT, INT64, BYTES or tuples of these"):
        Pages(tmp_path, key=mine)
    table: Any = perco.Table("two", key=perco.TEXT)
    with pytest.raises(perco.UsageError, match="give the sink one column"):
        Files(tmp_path).bind(table, [table.column("a", perco.TEXT), table.column("b", perco.TEXT)])
    Pages(tmp_path / "out").to.deliver([row("a", "one", 1)])
    with pytest.raises(perco.StoreError, match="the folder belongs to another sink"):
        Pages(tmp_path / "out", suffix=".txt").to.deliver([row("a", "one", 1)])
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(perco.StoreError, match=r"the sink .*file"):
        Pages(tmp_path / "file").to.deliver([row("a", "one", 1)])


def test_deliveries_of_two_processes_do_not_mix(tmp_path: Path) -> None:  # SF1
    program = (
        "import sys; from pathlib import Path; from tests.integration.views.test_files import Pages, row\n"
        "to = Pages(Path(sys.argv[1])).to\n"
        "for version in range(int(sys.argv[2]), 200, 2):\n"
        "    to.deliver([row(str(key), str(version), version) for key in range(3)])\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", program, tmp_path / "out", str(first)]) for first in (0, 1)]
    assert [process.wait(120) for process in started] == [0, 0]
    assert tree(tmp_path / "out") == {f"{key}.md": b"199" for key in range(3)}


def test_a_program_that_is_killed_leaves_a_folder_that_ends_right(tmp_path: Path) -> None:  # V11, SF1
    sinks.kill(__name__, tmp_path)
    pages = in_folder(tmp_path)
    with perco.sync.open(tmp_path / "s", pages.views.schema) as db, db.worker():
        db.wait_idle(timeout=60)
        with db.snapshot() as snap:
            checked = views.check_blocking(pages.views, snap)
            wanted = {f"a/{each.key[1]}.md": (each[pages.text] or "").encode() for each in snap.scan(pages.table)}
        assert (checked.equal, checked.rows["out"]) == (True, len(wanted))
    assert tree(tmp_path / "out") == wanted
