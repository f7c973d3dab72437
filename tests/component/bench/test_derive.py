"""The benchmark of derived tables: its corpus, its comparisons, and the verdicts that it draws from findings. No figure
of a system is judged here, and no peer is needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import derive
from bench.deriving import systems
from bench.deriving.corpus import Chunk, Corpus, compare, derive as function, key_of, replace_file, write_files
from bench.deriving.running import Cost
from bench.deriving.scenario import Found, Round
from bench.harness import Report

ROWS = [("a", Chunk(0, 3, "x")), ("a", Chunk(1, 4, "y")), ("b", Chunk(0, 5, "z"))]


def test_the_function_is_pure_and_its_versions_differ_in_all_rows() -> None:
    corpus = Corpus(50)
    assert list(corpus.rows(1)) == list(corpus.rows(1))
    first, second = dict(_by_place(corpus, 1)), dict(_by_place(corpus, 2))
    assert first.keys() == second.keys()
    assert all(first[place] != second[place] for place in first)
    assert {len(function(text, 1)) for _, text in corpus.texts()} == {1, 2, 3}


def _by_place(corpus: Corpus, version: int) -> list[tuple[tuple[str, int], Chunk]]:
    return [((key, chunk.n), chunk) for key, chunk in corpus.rows(version)]


def test_an_edit_changes_one_document() -> None:
    corpus = Corpus(5)
    before = dict(corpus.texts())
    text = corpus.edit(3)
    assert {key for key, now in corpus.texts() if now != before[key]} == {key_of(3)}
    assert dict(corpus.texts())[key_of(3)] == text != before[key_of(3)]
    assert [key for key, _ in corpus.texts(3)] == [key_of(3), key_of(4)]


def test_files_are_the_documents(tmp_path: Path) -> None:
    corpus, folder = Corpus(1001), tmp_path / "files"
    write_files(corpus, folder)
    replace_file(folder, key_of(1000), corpus.edit(1000))
    there = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.txt")}
    assert there == dict(corpus.texts())


def test_equal_tables_are_equal() -> None:
    compared = compare(ROWS, ROWS)
    assert compared.equal
    assert (compared.rows, str(compared)) == (3, "equal")
    assert compare([], []).equal


@pytest.mark.parametrize(
    ("found", "wanted", "counts"),
    [
        (ROWS[1:], ROWS, (1, 0, 0)),
        (ROWS[:2], ROWS, (1, 0, 0)),
        ([], ROWS, (3, 0, 0)),
        (ROWS, ROWS[:1], (0, 2, 0)),
        ([ROWS[0], *ROWS], ROWS, (0, 1, 0)),  # a row twice
        ([*ROWS[:2], ("b", Chunk(0, 5, "old"))], ROWS, (0, 0, 1)),
        ([("a", Chunk(0, 9, "x")), ("c", Chunk(0, 1, ""))], ROWS, (2, 1, 1)),
    ],
)
def test_each_difference_is_found(found: Any, wanted: Any, counts: tuple[int, int, int]) -> None:
    compared = compare(found, wanted)
    assert (compared.missing, compared.stray, compared.stale) == counts
    assert not compared.equal
    assert compared.rows == len(wanted)
    assert f"of {len(wanted)} rows: " in str(compared)


# ------------------------------------------------------------------ what comes out


def side(system: systems.System, documents: int, edits_ms: list[float], restart_s: float = 1.0, **found: Any) -> Any:
    cost = Cost(restart_s, 0.1, 50.0)
    rounds = [Round(cost, [ms, ms], 1.0) for ms in edits_ms]
    return SimpleNamespace(system=system, documents=documents, found=Found(build=cost, rounds=rounds, **found))


def judged(*sides: Any, again: Any = ()) -> Report:
    measured = derive.Measured({(each.system.key, each.documents): each for each in sides})
    measured.again = {each.system.key: each for each in again}
    report = Report("derive", "power")
    derive._judge(SimpleNamespace(say=lambda text: None), report, measured)  # type: ignore[arg-type]
    return report


def test_ratios_are_theirs_over_ours_with_the_most_documents_that_both_had() -> None:
    report = judged(
        side(systems.PERCO_FILES, 1000, [1, 1]),
        side(systems.PERCO_FILES, 10_000, [2, 4]),
        side(systems.COCOINDEX, 1000, [9, 9]),
        side(systems.COCOINDEX, 10_000, [8, 8]),
        side(systems.PATHWAY, 1000, [100, 100]),
        side(systems.PATHWAY, 10_000, [100]),  # a round is missing
        side(systems.PERCO_ROWS, 1000, [4]),
        side(systems.DBOS, 1000, [2]),
    )
    assert report.ratios == {"edit_vs_cocoindex": 3, "edit_vs_pathway": 100, "edit_vs_dbos": 0.5}
    assert report.missed == ["edit_vs_dbos"]


def test_an_edit_that_costs_more_with_more_documents_and_an_unequal_table_are_missed_bars() -> None:
    large = side(systems.PERCO_ROWS, 10_000, [2, 3], 1.05, unequal={"changed function": "1 stale"})
    small = side(systems.PERCO_ROWS, 1000, [1, 1])
    report = judged(large, side(systems.PERCO_ROWS, 1000, [9]), again=[small])
    assert report.ratios == {"edit_large_vs_small": 2.5, "restart_large_vs_small": 1.05}
    assert report.missed == ["edit_large_vs_small", "steps after which perco's table is not the batch result"]
    assert report.figures["perco_rows_10000_unequal"] == 1


def test_a_system_goes_no_further_after_a_failure_or_if_it_would_take_too_long() -> None:
    def fits(**found: Any) -> bool:
        before = side(systems.DBOS, 1000, [1], **found)
        before.limit_s = 15.0
        return derive._fits(systems.DBOS, 10_000, derive.Measured({("dbos", 1000): before}))

    assert fits()
    assert not fits(failed="cold build: not ready within 15 s")
    assert not fits(restart_s=2.0)
    assert not derive._fits(systems.PATHWAY, 1_000_000, derive.Measured())
    assert derive._largest(systems.PERCO_FILES, derive.SIZES) == 100_000
    assert derive._largest(systems.PERCO_ROWS, derive.SIZES) == 1_000_000
