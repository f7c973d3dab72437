"""The differences of a program and a store that are told before the program opens the store."""

from __future__ import annotations

import random
from typing import Any

import pytest

import perco
from perco.errors import SchemaMismatch
from perco.schema import removing
from perco.schema.catalogue import Catalogue
from perco.schema.differing import ADDS, CHANGES, LEAVES, REFUSES, Difference, differences


class Program:
    """Version 1 of a program, and changes to it."""

    def __init__(self, *, key: Any = perco.TEXT, codec: Any = perco.TEXT, keep: Any = None, store: Any = None) -> None:
        self.docs = perco.Table("docs", key=key, keep=keep)
        self.body = self.docs.column("body", codec)
        self.grown = self.docs.signal("grown")
        self.schema = perco.Schema(self.docs, keep=store)

    def observe(self, on: Any, id: str, **how: Any) -> Program:
        @self.schema.observe(on, id=id, **how)
        async def observer(txn: Any, change: Any) -> None: ...

        return self

    def parsing(self, **how: Any) -> Program:
        return self.observe(self.body, "parse", **how)


def catalogue(*programs: Program) -> Catalogue:
    made = Catalogue()
    for program in programs:
        made = made.declare(program.schema)
    return made


def found(before: Catalogue, program: Program) -> list[Difference]:
    return differences(before, program.schema)


def test_a_program_that_the_store_knows_changes_nothing() -> None:
    first = Program().parsing(version=3, delay_s=2)
    assert found(catalogue(first), Program().parsing(version=3, delay_s=2)) == []


def test_a_new_store() -> None:
    assert found(Catalogue(), Program().parsing()) == [
        (ADDS, "table docs", "keys of text"),
        (ADDS, "column docs.body", "text"),
        (ADDS, "column docs.grown", "a signal"),
        (ADDS, "observer parse", "on docs.body; runs for changes from then on"),
    ]


@pytest.mark.parametrize(
    ("how", "effect"),
    [
        ({}, "on docs.body; runs for all existing data"),
        ({"backfill": False}, "on docs.body; does not run for existing data (backfill=False)"),
    ],
)
def test_a_new_observer_of_what_is_there(how: dict[str, Any], effect: str) -> None:
    assert found(catalogue(Program()), Program().parsing(**how)) == [(ADDS, "observer parse", effect)]


def test_a_new_observer_of_a_signal() -> None:
    program = Program()
    program.observe(program.grown, "count")
    assert found(catalogue(Program()), program) == [
        (ADDS, "observer count", "on docs.grown; runs for changes from then on")
    ]


def test_a_higher_version_and_a_lower_one() -> None:
    low, high = Program().parsing(version=1), Program().parsing(version=4)
    assert found(catalogue(low), high) == [
        (CHANGES, "observer parse", "version 1 becomes 4; runs for all existing data")
    ]
    assert found(catalogue(high), low) == [
        (LEAVES, "observer parse", "is version 4 in the store, and 1 here: this program does not run it")
    ]


def test_when_an_observer_runs() -> None:
    effect = "no delay and priority 0 becomes a delay of 2 s (at most 20 s) and priority 7"
    assert found(catalogue(Program().parsing()), Program().parsing(delay_s=2, priority=7)) == [
        (CHANGES, "observer parse", effect)
    ]


def test_within_which_limits_an_observer_runs() -> None:
    effect = "no limits becomes concurrency=4, rate=2.5, backoff_s=(1.0, 60.0)"
    limited = Program().parsing(concurrency=4, rate=2.5, backoff_s=(1, 60))
    assert found(catalogue(Program().parsing()), limited) == [(CHANGES, "observer parse", effect)]
    assert found(catalogue(limited), limited) == []
    stored = Catalogue.unpack(catalogue(limited).pack())
    assert stored == catalogue(limited)
    assert stored.binds == catalogue(Program().parsing()).binds, "no transaction need know of it"


def test_what_the_program_does_not_declare_and_what_was_dropped() -> None:  # N17
    before = catalogue(Program().parsing())
    docs = perco.Table("docs", key=perco.TEXT)
    docs.column("note", perco.TEXT)
    without = Program()
    without.schema = perco.Schema(docs)
    assert found(before, without) == [
        (ADDS, "column docs.note", "text"),
        (LEAVES, "column docs.body", "this program does not declare it"),
        (LEAVES, "column docs.grown", "this program does not declare it"),
        (LEAVES, "observer parse", "on docs.body: this program lacks it, and its changes wait for one that has it"),
    ]
    without.schema = perco.Schema()
    assert found(catalogue(Program()), without) == [(LEAVES, "table docs", "this program does not declare it")]
    dropped = removing.without_columns(catalogue(Program()), "docs", ["body"])
    assert found(dropped, Program()) == [
        (ADDS, "column docs.body", "text; new and empty: one of this name was dropped")
    ]


def test_an_observer_of_a_table_that_is_refused_is_not_told_of() -> None:  # N18
    renamed = Program()
    renamed.docs = perco.Table("pages", key=perco.TEXT, was="docs")
    renamed.schema = perco.Schema(renamed.docs)
    renamed.observe(renamed.docs.column("body", perco.TEXT), "parse")
    forgotten = Program()
    forgotten.docs = perco.Table("pages", key=perco.TEXT)
    forgotten.schema = perco.Schema(forgotten.docs)
    forgotten.observe(forgotten.docs.column("body", perco.TEXT), "parse")
    before = catalogue(Program().parsing(), renamed)
    told = [each for each in found(before, forgotten) if each.kind == REFUSES]
    assert [each.what for each in told] == ["table pages"]
    assert "was made as 'docs' in this store: declare it with was=['docs']" in told[0].effect
    newest_first = perco.Table("papers", key=perco.TEXT, was=["pages", "docs"])
    forgotten.schema = perco.Schema(newest_first)
    [refused] = [each for each in found(before, forgotten) if each.kind == REFUSES]
    assert "declare it with was=['docs', 'pages']" in refused.effect


def test_what_is_renamed() -> None:  # N18
    before = catalogue(Program().parsing())
    docs = perco.Table("pages", key=perco.TEXT, was="docs")
    body = docs.column("text", perco.TEXT, was="body")
    docs.signal("grown")
    after = Program()
    after.docs, after.body, after.schema = docs, body, perco.Schema(docs)
    after.observe(body, "read", was="parse")
    assert found(before, after) == [
        (CHANGES, "table docs", "is renamed to pages"),
        (CHANGES, "column pages.body", "is renamed to text"),
        (CHANGES, "observer parse", "is renamed to read"),
    ]
    assert found(before.declare(after.schema), after) == []
    assert found(before.declare(after.schema), Program().parsing()) == [], "the older program changes nothing"


def test_observers_that_the_program_lacks_or_that_are_paused() -> None:
    before = catalogue(Program().parsing())
    effect = "on docs.body: this program lacks it, and its changes wait for one that has it"
    assert found(before, Program()) == [(LEAVES, "observer parse", effect)]
    assert found(before.with_paused("parse", True), Program().parsing()) == [
        (LEAVES, "observer parse", "is paused: it does not run until it is resumed")
    ]


def test_contradictions_are_all_told() -> None:
    before = catalogue(Program().parsing())
    program = Program(key=perco.INT64)
    program.observe(program.grown, "parse")
    told = found(before, program)
    assert [(each.kind, each.what) for each in told] == [(REFUSES, "table docs"), (REFUSES, "observer parse")]
    assert "has keys of text in the store and of int64 in the schema" in told[0].effect
    assert "the store has it on docs.body, this program on docs.grown" in told[1].effect
    with pytest.raises(SchemaMismatch):
        before.declare(program.schema)
    [codec] = found(before, Program(codec=perco.JSON).parsing())
    assert codec.kind == REFUSES
    assert "column docs.body is text in group 'data' in the store" in codec.effect


def test_how_long_versions_are_kept() -> None:
    keep = perco.Keep(seconds=60, versions=2)
    effect = "keeps old versions for 60 s, and the newest 2; so far as the store's default"
    assert found(catalogue(Program()), Program(keep=keep)) == [(CHANGES, "table docs", effect)]
    effect = "old versions are kept for 60 s, and the newest 2 by default; so far for 86400 s, and the newest 1"
    assert found(catalogue(Program()), Program(store=keep)) == [(CHANGES, "the store", effect)]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_told_is_what_opening_does(seed: int) -> None:
    """Nothing is told exactly if the catalogue stays the same; a refusal, exactly if opening is refused."""
    rng = random.Random(seed)

    def some() -> Program:
        program = Program(
            key=rng.choice([perco.TEXT, perco.TEXT, perco.INT64]),
            codec=rng.choice([perco.TEXT, perco.TEXT, perco.BYTES]),
            keep=rng.choice([None, perco.Keep(seconds=5)]),
            store=rng.choice([None, perco.Keep(seconds=7)]),
        )
        if rng.random() < 0.7:
            program.parsing(version=rng.randint(1, 3), priority=rng.randint(0, 1), backfill=rng.random() < 0.5)
        if rng.random() < 0.5:
            program.observe(rng.choice([program.body, program.grown]), "other")
        return program

    before = catalogue(some())
    program = some()
    kinds = {each.kind for each in found(before, program)}
    try:
        after = before.declare(program.schema)
    except SchemaMismatch:
        assert REFUSES in kinds
    else:
        assert REFUSES not in kinds
        assert (after is before) == (not kinds & {ADDS, CHANGES})
