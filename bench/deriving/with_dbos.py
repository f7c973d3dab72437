"""DBOS: documents and chunks are rows of a SQLite file, which a workflow for each edit writes in one transaction.

    python -m bench.deriving.with_dbos STATE FILES DOCUMENTS VERSION

The documents are loaded by one workflow, with a thousand of them in each of its steps. DBOS does not know which results
depend on a function, so for each version a workflow of the same kind computes all chunks again. A SQLite file is DBOS's
default; both of its files are in WAL mode, and sync each commit. Edits are called, not enqueued: the workers of a queue
poll it.
"""

from __future__ import annotations

import functools
import os
import sqlite3
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final

from dbos import DBOS, SetWorkflowID, SQLAlchemyDatasource

from bench.deriving import child
from bench.deriving.child import Counted, Job
from bench.deriving.corpus import Corpus

AT_ONCE: Final = 1000  # documents of a step
SCHEMA: Final = f"""
PRAGMA journal_mode=WAL;
CREATE TABLE IF NOT EXISTS docs (number INTEGER PRIMARY KEY, doc TEXT UNIQUE NOT NULL, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS {child.TABLE} (doc TEXT NOT NULL, n INTEGER NOT NULL, words INTEGER NOT NULL,
    vector TEXT NOT NULL, PRIMARY KEY (doc, n)) WITHOUT ROWID;
"""


class Program:
    """The workflows, and the transactions that are their steps."""

    def __init__(self, job: Job, function: Counted) -> None:
        self.job, self.function = job, function
        self._source: Any = SQLAlchemyDatasource.create(f"sqlite:///{job.derived}")
        self._load_some = self._source.transaction(self._load_in, name="load some")
        self._derive_some = self._source.transaction(self._derive_in, name="derive some")
        self._edit_one = self._source.transaction(self._edit_in, name="edit one")
        self.load = DBOS.workflow(name="load")(_function(self._load))
        self.derive = DBOS.workflow(name="derive")(_function(self._derive))
        self.edit = DBOS.workflow(name="edit")(_function(self._edit))

    # ------------------------------------------------------------ workflows

    def _load(self) -> None:
        for start in range(0, self.job.documents, AT_ONCE):
            self._load_some(start)

    def _derive(self) -> None:
        for start in range(0, self.job.documents, AT_ONCE):
            self._derive_some(start)

    def _edit(self, key: str, text: str) -> None:
        self._edit_one(key, text)

    # ------------------------------------------------------------ transactions

    def _load_in(self, start: int) -> None:
        some = list(islice(Corpus(self.job.documents).texts(start), AT_ONCE))
        self._run("INSERT INTO docs VALUES (?, ?, ?)", [(start + i, *document) for i, document in enumerate(some)])
        self._put(some)

    def _derive_in(self, start: int) -> None:
        session = self._source.sql_session()
        some = session.connection().exec_driver_sql(
            "SELECT doc, text FROM docs WHERE number >= ? AND number < ?", (start, start + AT_ONCE)
        )
        some = [(key, text) for key, text in some]
        self._run(f"DELETE FROM {child.TABLE} WHERE doc = ?", [(key,) for key, _ in some])
        self._put(some)

    def _edit_in(self, key: str, text: str) -> None:
        self._run("UPDATE docs SET text = ? WHERE doc = ?", [(text, key)])
        self._run(f"DELETE FROM {child.TABLE} WHERE doc = ?", [(key,)])
        self._put([(key, text)])

    def _put(self, some: Iterable[tuple[str, str]]) -> None:
        rows: list[tuple[Any, ...]] = [(key, *chunk) for key, text in some for chunk in self.function(text)]
        self._run(f"INSERT INTO {child.TABLE} VALUES (?, ?, ?, ?)", rows)

    def _run(self, statement: str, rows: list[tuple[Any, ...]]) -> None:
        self._source.sql_session().connection().exec_driver_sql(statement, rows)


def _function(method: Callable[..., None]) -> Callable[..., None]:
    """DBOS sets attributes of what it decorates, which methods do not allow."""

    @functools.wraps(method)
    def function(*given: Any) -> None:
        method(*given)

    return function


def run(job: Job) -> None:
    job.state.mkdir(parents=True, exist_ok=True)
    system = job.state / "dbos.db"
    for path, schema in ((job.derived, SCHEMA), (system, "PRAGMA journal_mode=WAL;")):
        connection = sqlite3.connect(path)
        connection.executescript(schema)
        connection.close()
    function = Counted(job.version)
    program = Program(job, function)
    DBOS(
        config={
            "name": "derive",
            "system_database_url": f"sqlite:///{system}",
            "application_version": "1",
            "log_level": "ERROR",
        }
    )
    DBOS.launch()  # it goes on with the workflows that an earlier process left
    child.say(open=True)
    _once("load", program.load)
    if job.version > 1:
        _once(f"derive with version {job.version}", program.derive)
    for status in DBOS.list_workflows(status="PENDING"):
        DBOS.retrieve_workflow(status.workflow_id).get_result(polling_interval_sec=0.01)
    child.say(ready=True, calls=function.calls)
    for order in child.orders():
        if "key" in order:
            program.edit(order["key"], order["text"])
        child.say(done=order.get("id"), calls=function.calls)
    DBOS.destroy()
    os._exit(0)


def _once(id: str, workflow: Any) -> None:
    """Run a workflow, unless it has run in an earlier process, or goes on from there."""
    with SetWorkflowID(id):
        DBOS.start_workflow(workflow).get_result(polling_interval_sec=0.01)


if __name__ == "__main__":
    run(child.job())
