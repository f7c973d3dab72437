"""`perco web load --spark`: the same index as one process makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perco.errors import UsageError
from perco.webindex.on_spark import later, split
from perco.webindex.pages import Page
from perco.webindex.search import SearchIndex
from perco.webindex.service import search_path


def perco(*arguments: str) -> str:
    command = [sys.executable, "-m", "perco", *arguments]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def digest(store: Path) -> tuple[str, int]:
    with SearchIndex(search_path(store)) as search:
        return search.digest(), search.count()


def test_two_sources_by_way_of_spark_and_by_one_process(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for n in range(20):
        (saved / f"{n}.html").write_text(f"<title>page {n}</title>words of {n} <a href='{(n + 1) % 20}.html'>next</a>")
    sources = ("--html", str(saved), "--synthetic", "150")
    assert "search it" in perco("web", "load", str(tmp_path / "one"), *sources, "--spark", "--master", "local[2]")
    perco("web", "load", str(tmp_path / "other"), *sources)
    one, other = digest(tmp_path / "one"), digest(tmp_path / "other")
    assert one == other
    assert one[1] > 100
    perco("check", str(tmp_path / "one"))  # it ends with 1 if there is anything


def test_each_source_is_a_task_of_its_own() -> None:
    assert split([]) == [[]]
    assert split(["--limit", "5"]) == [["--limit", "5"]]
    assert split(["--stdlib", "--mine", "a", "--warc", "x", "--warc", "y"]) == [
        ["--stdlib"],
        ["--mine", "a"],
        ["--warc", "x"],
        ["--warc", "y"],
    ]
    assert split(["--synthetic", "9", "--seed", "2", "--limit", "3"]) == [
        ["--synthetic", "9", "--seed", "2", "--limit", "3"]
    ]
    with pytest.raises(UsageError, match="give --limit with one source"):
        split(["--mine", "a", "--mine", "b", "--limit", "3"])


def test_of_two_pages_of_a_url_the_last_is_loaded() -> None:
    first, last = ((0, 5), Page("u", body=b"1")), ((1, 0), Page("u", body=b"2"))
    assert later(first, last) == later(last, first) == last
