"""`perco web` and `perco demo`, as a user runs them."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perco.webindex.demo import fresh
from perco.webindex.places import search_path
from perco.webindex.search import SearchIndex
from tests.support import bigtable, postgresql


def perco(*arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perco", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


def save_pages(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.html").write_text('<title>Apples</title><p>red fruit</p><a href="b.html">more fruit</a>')
    (folder / "b.html").write_text('<title>Bananas</title><p>yellow</p><a href="a.html">back</a>')
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_pages(tmp_path / "saved")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A web index of two pages that no test changes."""
    folder = tmp_path_factory.mktemp("web")
    done = perco("web", "load", folder / "store", "--html", save_pages(folder / "saved"), "--json")
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["searchable"] == 2
    assert last["idle"]
    return folder / "store"


def test_what_was_loaded_is_found_by_its_text_and_by_what_links_to_it_say(store: Path) -> None:
    found = perco("web", "search", store, "yellow", "--json")
    assert [json.loads(line)["title"] for line in found.stdout.splitlines()] == ["Bananas"]
    by_anchor = perco("web", "search", store, "back", "--json")  # what Bananas says of Apples
    assert "Apples" in [json.loads(line)["title"] for line in by_anchor.stdout.splitlines()]
    people = perco("web", "search", store, "yellow")
    assert "Bananas" in people.stdout
    assert "1 hit " in people.stdout


def test_a_recrawl_works_only_on_what_has_changed(saved: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert perco("web", "load", store, "--html", saved).returncode == 0
    again = perco("web", "recrawl", store, "--json")
    load = json.loads(again.stdout.splitlines()[-1])["load"]
    assert (load["changed"], load["unchanged"]) == (0, 2)
    (saved / "b.html").write_text("<title>Bananas</title><p>green by now</p>")
    changed = perco("web", "recrawl", store, "--json")
    load = json.loads(changed.stdout.splitlines()[-1])["load"]
    assert (load["changed"], load["unchanged"]) == (1, 1)
    assert perco("web", "search", store, "yellow").returncode == 1
    assert perco("web", "search", store, "green").returncode == 0


def test_a_search_tells_duplicates_ranks_and_who_links_with_what_words(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    for name in ("mirror", "original"):
        (pages / f"{name}.html").write_text("<title>Cherries</title>a red fruit")
    for name in "xyz":
        (pages / f"{name}.html").write_text(f"<title>{name}</title><a href=original.html>sour</a>")
    (pages / "w.html").write_text("<title>w</title><a href=mirror.html>sweet</a>")
    assert perco("web", "load", tmp_path / "store", "--html", pages, "--json").returncode == 0
    first = json.loads(perco("web", "search", tmp_path / "store", "red", "--json").stdout)
    assert first["url"].endswith("/mirror.html")  # of equal ranks the smallest URL
    assert first["rank"] == 1.0
    done = perco("web", "rank", tmp_path / "store", "--json")
    ranked = json.loads(done.stdout.splitlines()[-1])
    assert (ranked["pages"], ranked["links"]) == (6, 4), done.stderr
    found = json.loads(perco("web", "search", tmp_path / "store", "red", "--json").stdout)
    assert found["url"].endswith("/original.html")
    assert found["rank"] > 1
    assert [url[-12:] for url in found["duplicates"]] == ["/mirror.html"]
    assert [text for _, text in found["anchors"]] == ["sour", "sour", "sour", "sweet"]
    people = perco("web", "search", tmp_path / "store", "sweet").stdout
    assert "also at " in people
    assert '"sweet"' in people
    stats = json.loads(perco("web", "stats", tmp_path / "store", "--json").stdout)
    assert (stats["pages"], stats["documents"], stats["searchable"]) == (6, 5, 5)


def test_pages_that_are_made_up_are_loaded(tmp_path: Path) -> None:
    done = perco("web", "load", tmp_path / "store", "--synthetic", 60, "--seed", 2, "--json")
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["load"]["crawled"], last["idle"]) == (60, True), done.stderr
    assert perco("web", "rank", tmp_path / "store").stdout.count("ranks were rewritten") == 1


def test_statistics_and_check_of_a_web_index(store: Path) -> None:
    stats = json.loads(perco("web", "stats", store, "--json").stdout)
    assert stats["documents"] == stats["pages"] == stats["searchable"] == 2
    assert set(stats["waiting"].values()) == {0}
    assert perco("check", store).returncode == 0


def searchable(index: Path) -> list[int]:
    """The documents of the rows, and of the search index."""
    stats = json.loads(perco("web", "stats", index, "--json").stdout)
    return [stats["documents"], stats["searchable"]]


def refused(*arguments: object) -> str:
    """The error message of a command that is wrong usage."""
    done = perco(*arguments)
    assert done.returncode == 2, done.stdout
    return done.stderr


@pytest.mark.parametrize("database", [postgresql, bigtable], ids=["postgresql", "bigtable"])
def test_the_rows_may_be_in_a_database(database: Any, saved: Path, tmp_path: Path) -> None:
    url, index = database.fresh(), tmp_path / "index"
    loaded = perco("web", "load", index, "--html", saved, "--rows", url)
    assert loaded.returncode == 0, loaded.stderr
    assert not (index / "tablets").exists()
    assert (index / "rows").stat().st_mode & 0o077 == 0, "an address may have a password"
    (index / "search.sqlite").unlink()  # it is made again from the rows
    missing = perco("web", "search", index, "fruit")
    assert missing.returncode == 1
    assert "perco web run" in missing.stderr
    ranked = perco("web", "rank", index)
    assert ranked.returncode == 0, ranked.stderr
    assert searchable(index) == [2, 2]
    found = perco("web", "search", index, "fruit", "--at", "0s", "--json")
    assert "Apples" in [json.loads(line)["title"] for line in found.stdout.splitlines()]
    moved = refused("web", "load", index, "--html", saved, "--rows", f"{url}x")
    assert "has its rows at" in moved
    assert "name another folder" in moved


def test_one_folder_at_a_time_has_the_search_index_of_rows_in_a_database(saved: Path, tmp_path: Path) -> None:
    url, one, other = postgresql.fresh(), tmp_path / "one", tmp_path / "other"
    assert perco("web", "load", one, "--html", saved, "--rows", url).returncode == 0
    shutil.copytree(one, tmp_path / "backup")
    told = refused("web", "load", other, "--html", saved, "--rows", url)
    assert f"go to the search index in {socket.gethostname()}:{one}" in told
    assert not other.exists()

    more = tmp_path / "more"
    more.mkdir()
    (more / "c.html").write_text("<title>Cherries</title><p>small</p>")
    taken = perco("web", "load", other, "--html", more, "--rows", url, "--take-over")
    assert taken.returncode == 0, taken.stderr
    assert searchable(other) == [3, 3], "those that it has loaded, and those of before"
    assert "--take-over" in refused("web", "run", one)
    back = perco("web", "load", one, "--html", saved, "--rows", url, "--take-over")
    assert back.returncode == 0, back.stderr
    assert searchable(one) == [3, 3], "it has missed one"
    assert "--take-over" in refused("web", "rank", tmp_path / "backup"), "its search index is that of another time"
    one.rename(tmp_path / "moved")
    assert perco("web", "rank", tmp_path / "moved").returncode == 0


def test_rows_that_were_made_anew_do_not_keep_the_search_index_of_others(saved: Path, tmp_path: Path) -> None:
    folder, index = tmp_path / "served", tmp_path / "index"
    for title in ("Former", "Later"):
        (saved / "b.html").write_text(f"<title>{title}</title>")
        with serving(folder) as address:
            loaded = perco("web", "load", index, "--html", saved, "--rows", address)
            assert loaded.returncode == 0, loaded.stderr
            assert searchable(index) == [2, 2]
        shutil.rmtree(folder)
    with SearchIndex(search_path(index)) as search:
        assert {document.title for document in search.documents()} == {"Apples", "Later"}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """`perco serve` of a folder, which it makes."""
    command = [sys.executable, "-m", "perco", "serve", str(folder), "--durability", "process"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving")
        yield f"unix:{folder}/socket"
        process.terminate()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("memory:", "cannot be the place of the rows"),
        ("somewhere/", "cannot be the place of the rows"),
        ("postgresql://me:secret@[::1/x", "secret"),
    ],
)
def test_places_where_rows_cannot_be(address: str, said: str, saved: Path, tmp_path: Path) -> None:
    told = refused("web", "load", tmp_path / "index", "--html", saved, "--rows", address)
    assert (said in told) == (said != "secret"), told
    assert not (tmp_path / "index").exists()


def test_a_folder_that_cannot_be_written_is_not_named_in_the_rows(saved: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "served") as address:
        told = refused("web", "load", "/proc/index", "--html", saved, "--rows", address)
        assert "cannot be written" in told
        loaded = perco("web", "load", tmp_path / "index", "--html", saved, "--rows", address)
        assert loaded.returncode == 0, loaded.stderr


def test_a_folder_with_rows_gets_its_search_index_again(store: Path) -> None:
    with SearchIndex(search_path(store)) as search:
        wanted = search.digest()
    for file in store.glob("search.sqlite*"):
        file.unlink()
    again = perco("web", "recrawl", store)
    assert again.returncode == 0, again.stderr
    with SearchIndex(search_path(store)) as search:
        assert search.digest() == wanted


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("web", "search", "STORE", "..."), "at least one word"),
        (("web", "search", "STORE", "x", "--at", "yesterday-ish"), "is not a time"),
        (("web", "search", "STORE", "x", "--at", "2001-01-01T00:00"), "no snapshot"),
        (("web", "search", "EMPTY", "x"), "perco web load"),
        (("web", "rank", "EMPTY"), "perco web load"),
        (("web", "load", "EMPTY", "--html", "EMPTY"), "folder of saved web pages"),
        (("web", "load", "EMPTY", "--warc", "missing.warc.gz"), "is not a file"),
        (("web", "load", "EMPTY", "--mine", "no_such_package"), "no_such_package"),
    ],
)
def test_misuse_is_told_in_a_sentence_and_without_a_traceback(
    store: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    named = {"STORE": str(store), "EMPTY": str(tmp_path / "empty")}
    done = perco(*[named.get(argument, argument) for argument in arguments])
    assert done.returncode in (1, 2), done.stdout
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "usage:" not in done.stderr


def test_an_index_of_an_older_version_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "old" / "tablets" / "crawls-0").mkdir(parents=True)
    (tmp_path / "old" / "search.sqlite").touch()
    for command in (("load",), ("rank",), ("search", "x"), ("stats",), ("recrawl",)):
        done = perco("web", command[0], tmp_path / "old", *command[1:])
        assert done.returncode == 1
        assert "earlier version" in done.stderr
        assert "another folder" in done.stderr


def test_hostile_pages_are_loaded_and_the_rest_is_found(tmp_path: Path) -> None:
    """A page of 100 MB, one of 100 000 links, one of 200 000 open tags, a lie about the charset, a cut archive."""
    pages, cut = tmp_path / "pages", tmp_path / "cut.warc.gz"
    pages.mkdir()
    (pages / "huge.html").write_bytes(b"<title>Huge</title>hippo " + b"<p>a word</p>" * (100_000_000 // 13))
    links = b"".join(b"<a href=p%d.html>text %d</a>" % (i, i) for i in range(100_000))
    (pages / "links.html").write_bytes(b"<title>Links</title>giraffe " + links)
    (pages / "deep.html").write_bytes(b"<div>" * 200_000 + b"penguin")
    (pages / "latin.html").write_bytes("<meta charset=utf-8><title>Latin</title>caf\xe9 crocodile".encode("latin-1"))
    odd = b"<base href=http://elsewhere.example/><a href=links.html>x</a><a href=odd.html>self</a>"
    odd += "<a href=mailto:a@b.example>m</a><a href=data:,x>d</a><a href=http://bücher.example/>i</a> zebra".encode()
    (pages / "odd.html").write_bytes(b"<title>Odd</title>" + odd)
    (pages / ("k" * 250 + ".html")).write_text("<title>Long</title>ostrich")
    cut.write_bytes(gzip.compress(b"WARC/1.0\r\n" * 50)[:40])
    done = perco("web", "load", tmp_path / "store", "--html", pages, "--warc", cut, "--json")
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert (last["searchable"], last["idle"], last["load"]["skipped"]) == (6, True, 1)
    for word in ("hippo", "giraffe", "penguin", "crocodile", "zebra", "ostrich"):
        found = perco("web", "search", tmp_path / "store", word, "--json")
        assert len(found.stdout.splitlines()) == 1, word
    assert perco("check", tmp_path / "store").returncode == 0


def test_a_load_shows_its_stages_on_a_terminal(saved: Path, tmp_path: Path) -> None:
    terminal, side = pty.openpty()
    command = [sys.executable, "-m", "perco", "web", "load", str(tmp_path / "store"), "--html", str(saved)]
    process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side)
    os.close(side)
    shown = ""
    with contextlib.suppress(OSError):  # the terminal's end, when nobody has it open any more
        while part := os.read(terminal, 1 << 16):
            shown += part.decode(errors="replace")
    os.close(terminal)
    assert process.wait(timeout=240) == 0, shown
    assert "searchable" in shown
    assert "search it: " in shown


def test_a_crawl_by_itself_does_not_write_its_stream_to_a_terminal(saved: Path) -> None:
    terminal, side = pty.openpty()
    command = [sys.executable, "-m", "perco.webindex.crawl", "--html", str(saved)]
    try:
        done = subprocess.run(command, stdout=side, stderr=subprocess.PIPE, timeout=240)
    finally:
        os.close(terminal)
        os.close(side)
    assert (done.returncode, done.stderr[:22]) == (2, b"the output is binary: ")


def test_the_demo_ends_quietly_when_its_reader_goes_away(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perco", "demo", "--dir", str(tmp_path / "demo"), "--limit", "200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("1  A crawler")
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=240) == 1


def test_the_demo_is_not_made_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for place, said in (("thesis.txt", "is a file"), ("thesis.txt/demo", "cannot be made: Not a directory")):
        done = perco("demo", "--dir", tmp_path / place)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith("name a folder with --dir\n") or "name another folder" in done.stderr
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_demo_leaves_a_folder_that_it_did_not_make_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    done = perco("demo", "--dir", tmp_path)
    assert done.returncode == 2
    assert "holds files that no demo made" in done.stderr
    assert (tmp_path / "thesis.txt").exists()


def test_the_next_demo_removes_only_what_a_demo_makes(tmp_path: Path) -> None:
    store = fresh(tmp_path / "demo")
    for name in ("store", "spark", "embedded", "mine"):
        (tmp_path / "demo" / name).mkdir()
        (tmp_path / "demo" / name / "perco-format").write_text("perco 1")
    assert fresh(tmp_path / "demo") == store == tmp_path / "demo" / "store"
    left = {str(path.relative_to(tmp_path / "demo")) for path in (tmp_path / "demo").rglob("*")}
    assert left == {"perco-demo", "mine", "mine/perco-format"}


def test_the_demo_survives_its_own_kill_and_equals_a_batch_rebuild(tmp_path: Path) -> None:
    done = perco("demo", "--dir", tmp_path / "demo", "--limit", 600)
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        *("answered in", "killed at", "perco check: clean", "equal to the batch build", "searchable after"),
        *("ranks were written", "got another canonical page", "└── export"),
    ):
        assert said in done.stdout, done.stdout
    edited, _, past = done.stdout.partition("One page is edited")[2].partition("6  Is the index right?")
    assert re.search(r"pages\.contents (\S+) *\n +└── parse +pages\.contents \1 +[0-9.]+ ms", edited), edited
    assert re.search(r"─ parse .*\n +[├└]── elect +dups.changed.*\n[ │]+└── export +dups.listing", edited), (
        edited
    )  # by signals
    assert re.search(r"7 .* (as of .* ago,|does not go back)", past), past
    assert "as of a minute ago" in past or "does not go back" in past, past
    if "a canonical page" in edited:  # not every Python has duplicates among its first modules
        assert "has a new canonical page" in edited
