"""`perco web load --spark`: the same index as one process makes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from pyspark.sql import SparkSession

from perco import spark as perco_spark
from perco.errors import UsageError
from perco.webindex import on_spark
from perco.webindex.crawled import DOCS_URL
from perco.webindex.on_spark import later, split
from perco.webindex.pages import Page
from perco.webindex.places import search_path
from perco.webindex.search import SearchIndex
from perco.webindex.service import Loaded, serve


def perco(*arguments: str, timeout: float = 200) -> str:
    command = [sys.executable, "-m", "perco", *arguments]
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
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


def test_a_whole_crawl_of_the_documentation_removes_what_has_gone_and_loads_what_has_changed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for n in range(5):
        (saved / f"{n}.html").write_text(f"<title>page {n}</title>words of {n}")
    monkeypatch.setattr(on_spark, "split", lambda sources: [["--html", str(saved)]])  # a documentation of five pages

    given_beside: list[Any] = []
    real = perco_spark.load

    def watched(*arguments: Any, **given: Any) -> Any:
        given_beside.append(given["beside"])
        return real(*arguments, **given)

    async def main() -> None:
        with perco_spark.serve(tmp_path / "store", spark) as store:
            async with serve(tmp_path / "store") as service:

                async def urls() -> set[str]:
                    async with service.db.snapshot() as snap:
                        return {row.key async for row in snap.scan(service.index.pages)}

                await service.load(["--html", str(saved)])
                before = await urls()
                gone = Page(DOCS_URL + "gone", body=b"<title>gone</title>")
                await service.db.run(service.index.load, gone)
                [changed] = [url for url in before if url.endswith("3.html")]
                (saved / "3.html").write_text("<title>page 3</title>other words")
                # A load that failed took an older version of the page that has changed, and its job is open.
                old = spark.sparkContext.parallelize([Page(changed, body=b"<title>older</title>")], 1)
                loader = partial(on_spark.load_page, spark.sparkContext.accumulator(0))
                given: dict[str, Any] = {"key": on_spark.url_of, "beside": on_spark._INDEX.pages, "job": on_spark._JOB}
                given["schema"] = on_spark._INDEX.schema
                await trio.to_thread.run_sync(lambda: perco_spark.load(old, store, loader, **given))
                service.loaded = Loaded()
                with monkeypatch.context() as patched:
                    patched.setattr(perco_spark, "load", watched)
                    await on_spark.load(service, spark, store, [])
                assert given_beside == [on_spark._INDEX.pages]  # marks in a table of their own are slower
                counts = service.loaded
                assert (counts.crawled, counts.changed, counts.unchanged, counts.removed) == (5, 1, 4, 1)
                assert await urls() == before
                await service.db.wait_idle()
                assert len(service.search.search("words")) == 5
                assert [hit.url for hit in service.search.search("other")] == [changed]
            assert await trio.to_thread.run_sync(perco_spark.jobs, store, spark) == {}

    trio.run(main)


def test_the_demo_compares_both_stores_as_data_frames_and_explains_its_times(tmp_path: Path) -> None:
    said = perco("demo", "--spark", "--dir", str(tmp_path / "demo"), "--limit", "200", timeout=900)
    compared = re.findall(r"^   (\w+) +(\d+) rows: (.*)$", said, re.MULTILINE)
    assert [(name, how) for name, _, how in compared] == [(name, "equal") for name in on_spark._INDEX.schema.tables]
    assert {name: int(count) for name, count, _ in compared}["pages"] == 200
    [(on, alone)] = re.findall(r"On Spark (\d+) s, in one process (\d+) s, .* Spark took another \d+ s to start", said)
    assert re.findall(r"200 pages loaded and searchable after (\d+) s", said) == [on, alone]
    assert "Spark has more to do: " in said


def test_the_demo_says_which_tables_differ(spark: SparkSession, tmp_path: Path) -> None:
    async def main() -> None:
        for name, body in (("spark", b"<title>a</title>one"), ("embedded", b"<title>a</title>other")):
            async with serve(tmp_path / name) as service:
                for page in (Page(DOCS_URL + "a", body=body), Page(DOCS_URL + "b", body=b"<title>b</title>same")):
                    await service.db.run(service.index.load, page)
                await service.db.wait_idle()

    trio.run(main)
    said: list[str] = []
    assert not on_spark._compare(spark, tmp_path, said.append)
    of = {line.split()[0]: line for line in said}
    assert of["pages"].endswith("2 rows: 1 only in the store from Spark, 1 only in the other")
    assert of["crawls"].endswith("equal")


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
    with pytest.raises(UsageError, match="give --limit only with a single source"):
        split(["--mine", "a", "--mine", "b", "--limit", "3"])


def test_of_two_pages_of_a_url_the_last_is_loaded() -> None:
    first, last = ((0, 5), Page("u", body=b"1")), ((1, 0), Page("u", body=b"2"))
    assert later(first, last) == later(last, first) == last
