"""Errors of tasks, as Spark passes them on; and the report of rows that could not be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException

import perco.spark
from perco.errors import PercoWarning, SchemaMismatch, UsageError
from perco.spark.failing import FailedRow, reason_first, reason_of, report

STACK = "\tat org.apache.spark.api.python.BasePythonRunner.read(PythonRunner.scala:1)\n"
TRACE = 'Traceback (most recent call last):\n  File "worker.py", line 1, in main\n    process()\n    ~~~~~~~^^\n'
TASK = "Job aborted due to stage failure: Task 0 failed 4 times: org.apache.spark.api.python.PythonException: "


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{TASK}{TRACE}OSError: disk\n\n{STACK}\nDriver stacktrace:\n{STACK}", ("OSError", "disk")),
        (f"{TRACE}perco.errors.UsageError: one\n  two\nthree\n SQLSTATE: 38000", ("UsageError", "one\n  two\nthree")),
        (f"{TASK}{TRACE}KeyError\n{STACK}", ("KeyError", "")),
        (
            f"{TASK}{TRACE}KeyError: 'a'\n\nThe above exception was the direct cause of the following exception:\n\n"
            f"{TRACE}app.Broken: no a\n{STACK}",
            ("Broken", "no a"),
        ),
        (f"{TASK}{TRACE}", None),
        ("Job 3 cancelled", None),
    ],
)
def test_the_reason_is_found_in_spark_s_text(text: str, reason: tuple[str, str] | None) -> None:
    assert reason_of(text) == reason


def test_an_error_of_a_task_is_raised_as_what_it_is() -> None:
    for kind, name in (
        (UsageError, "perco.errors.UsageError"),
        (SchemaMismatch, "perco.errors.SchemaMismatch"),
        (perco.spark.KeyNotUnique, "perco.spark.ledger.KeyNotUnique"),
    ):
        spark_s = PySparkException(f"{TASK}{TRACE}{name}: so\n{STACK}")
        spark_s.add_note("perco: go on")
        with pytest.raises(kind) as raised, reason_first():
            raise spark_s
        assert str(raised.value) == "so"
        assert raised.value.__cause__ is spark_s
        assert raised.value.__notes__ == ["perco: go on"]
    with pytest.raises(perco.spark.TaskFailed, match=r"^Unavailable: gone$"), reason_first():
        raise PySparkException(f"{TASK}{TRACE}perco.errors.Unavailable: gone\n{STACK}")
    with pytest.raises(PySparkException, match="cancelled"), reason_first():
        raise PySparkException("Job 3 cancelled")


def test_rows_that_failed_are_told_and_too_many_are_an_error(tmp_path: Path) -> None:
    rows = [FailedRow(f"k{n}", f"reason {n}", "{}") for n in range(7)]
    with pytest.warns(PercoWarning, match=r"^7 rows of a frame not written to table 't': key k0: reason 0; .*k4"):
        report("t", 7, rows, 7, "", stopped=False)
    with pytest.raises(UsageError, match=r"^reason 0 \(1 row failed, and failures_max is 0;"):
        report("t", 1, rows[:1], 0, "", stopped=False)
    (tmp_path / "told").write_text("of an earlier write")
    report("t", 0, [], 0, str(tmp_path / "told"), stopped=False)
    assert (tmp_path / "told").read_text() == ""
