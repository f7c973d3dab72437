"""Pathway over a folder: a function of each file, flattened into rows of a snapshot table in SQLite.

    python -m bench.deriving.with_pathway STATE FILES 0 VERSION

It scans the folder again and again, as often as it can. It persists all that it has read, or computed, in a folder of
the function's version: with the state of another version, it would not compute it again. There is no license key, so it
has no telemetry.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from typing import Final

import pathway as pw

from bench.deriving import child
from bench.deriving.child import Counted, Job

COMMIT_MS: Final = 10  # shorter than the time between its looks at the folder


def run(job: Job) -> None:
    function = Counted(job.version)
    persisted = job.state / f"pathway-{job.version}"
    anew = not persisted.exists()
    connection = sqlite3.connect(job.derived)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()

    def rows(text: str, path: str) -> list[tuple[str, int, int, str]]:
        key = os.path.relpath(path, job.files)
        return [(key, *chunk) for chunk in function(text)]

    files = pw.io.fs.read(
        job.files,
        format="plaintext_by_file",
        mode="streaming",
        with_metadata=True,
        autocommit_duration_ms=COMMIT_MS,
        name="files",
    )
    path = pw.this._metadata["path"].as_str()
    made = files.select(row=pw.apply_with_type(rows, list[tuple[str, int, int, str]], pw.this.data, path))
    flat = made.flatten(pw.this.row)
    table = flat.select(doc=pw.this.row[0], n=pw.this.row[1], words=pw.this.row[2], vector=pw.this.row[3])
    pw.io.sqlite.write(
        table,
        job.derived,
        child.TABLE,
        init_mode="replace" if anew else "create_if_not_exists",
        output_table_type="snapshot",
        primary_key=[table.doc, table.n],
        name="derived",
    )
    backend = pw.persistence.Backend.filesystem(persisted)

    def reports() -> None:
        for order in child.orders():
            child.say(done=order, calls=function.calls)
        os._exit(0)

    threading.Thread(target=reports, daemon=True).start()
    pw.run(
        monitoring_level=pw.MonitoringLevel.NONE,
        persistence_config=pw.persistence.Config(backend),
    )


if __name__ == "__main__":
    run(child.job())
