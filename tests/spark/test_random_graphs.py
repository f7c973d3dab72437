"""Random graphs of views that Spark builds, and that observers keep: after any history, the store has what the batch
build makes of the sources. `python -m tests.spark.test_random_graphs --seeds 50` builds more graphs."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from pyspark.sql import SparkSession

import perco
import perco.spark
from perco.testing.graphs import State
from perco.views.memory import Memory
from tests.spark import graph_app
from tests.spark.conftest import quiet, reach
from tests.support.graphs import write

OPTIONS = perco.Options(durability="process")
SEEDS = (3, 7)


def histories(seed: int, folder: Path, schema: perco.Schema, count: int, name: str, *, work: bool) -> list[str]:
    """Write a random history; with `work`, let the observers run, and return what is not as the build makes it."""
    graph, rng = graph_app.graph(seed), random.Random(f"{seed} {name}")

    async def main() -> list[str]:
        async with perco.open(folder, schema, options=OPTIONS) as db:
            if not work:
                for _ in range(count):
                    await write(db, graph.changes(rng, State()))
                return []
            async with db.worker():
                for _ in range(count):
                    await write(db, graph.changes(rng, State()))
                await db.wait_idle(timeout=120)
                async with db.snapshot() as snap:
                    assert any((await graph.held(snap)).values())
                    return await graph.differences(snap)

    return trio.run(main)


def everything(seed: int, folder: Path) -> dict[str, dict[Any, dict[str, Any]]]:
    """All that the store has, hidden columns too; but not how far runs have seen, nor what is still to be folded."""
    schema = graph_app.graph(seed).views.schema

    async def main() -> dict[str, dict[Any, dict[str, Any]]]:
        found: dict[str, dict[Any, dict[str, Any]]] = {}
        async with perco.open(folder, schema, options=OPTIONS) as db, db.snapshot() as snap:
            for name, table in schema.tables.items():
                if name.endswith(".deltas"):
                    continue
                rows = found[name] = {}
                for column in [*table.columns.values(), *table.hidden.values()]:
                    async for row in snap.scan(table, columns=[column]):
                        value = row[column]
                        if column.name.startswith("_view"):
                            memory = Memory.unpack(value)
                            if not memory.rows:
                                continue
                            value = sorted(memory.rows.items()), memory.version, memory.columns
                        rows.setdefault(row.key, {})[column.name] = repr(value)
        return {name: rows for name, rows in found.items() if rows}

    return trio.run(main)


def build_and_follow(seed: int, spark: SparkSession, folder: Path) -> list[str]:
    """Returns what is wrong at the end."""
    graph = graph_app.graph(seed)
    sources = perco.Schema(*(shape.table for shape in graph.sources))
    for place in ("spark", "observers"):
        histories(seed, folder / place, sources, 25, "before", work=False)
    perco.spark.build(f"tests.spark.graph_app:views_{seed}", spark, folder / "spark", partitions=2)
    found = histories(seed, folder / "spark", graph.views.schema, 0, "", work=True)
    found += histories(seed, folder / "observers", graph.views.schema, 0, "", work=True)
    by_spark, by_observers = everything(seed, folder / "spark"), everything(seed, folder / "observers")
    for name in sorted(by_spark.keys() | by_observers.keys()):
        if by_spark.get(name) != by_observers.get(name):
            found.append(f"{name}: {by_spark.get(name)} by Spark, {by_observers.get(name)} by observers")
    return found + histories(seed, folder / "spark", graph.views.schema, 25, "after", work=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_spark_builds_of_a_random_graph_observers_keep(  # V1 V7
    seed: int, spark: SparkSession, tmp_path: Path
) -> None:
    assert build_and_follow(seed, spark, tmp_path) == []


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing was wrong, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.spark.test_random_graphs", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="how many graphs (default: 20)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default: 0)")
    given = parser.parse_args(arguments)
    reach()
    builder = SparkSession.builder.master("local[2]")
    for name, value in quiet().items():
        builder = builder.config(name, value)
    spark, wrong = builder.getOrCreate(), 0
    for seed in range(given.first, given.first + given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            found = build_and_follow(seed, spark, Path(folder))
        wrong += bool(found)
        for text in found[:3]:
            print(f"seed {seed}: {text}", flush=True)
    spark.stop()
    print(f"{given.seeds} graphs, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
