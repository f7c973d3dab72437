"""`perco web load --spark`: the same index as one process makes."""

from __future__ import annotations

import os
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
from perco.webindex.crawl import DOCS_URL
from perco.webindex.on_spark import later, split
from perco.webindex.pages import Page
from perco.webindex.search import SearchIndex
from perco.webindex.service import Loaded, search_path, serve


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


def test_a_whole_crawl_of_the_documentation_removes_what_has_gone_and_loads_what_has_changed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for n in range(5):
        (saved / f"{n}.html").write_text(f"<title>page {n}</title>words of {n}")
    monkeypatch.setattr(on_spark, "split", lambda sources: [["--html", str(saved)]])  # a documentation of five pages

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
                await on_spark.load(service, spark, store, [])
                counts = service.loaded
                assert (counts.crawled, counts.changed, counts.unchanged, counts.removed) == (5, 1, 4, 1)
                assert await urls() == before
                await service.db.wait_idle()
                assert len(service.search.search("words")) == 5
                assert [hit.url for hit in service.search.search("other")] == [changed]
            assert await trio.to_thread.run_sync(perco_spark.jobs, store, spark) == {}

    trio.run(main)


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
