"""`python -m perco.testing history.jsonl`: decides whether a history satisfies snapshot isolation."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from perco.errors import UsageError
from perco.testing.drawing import draw, mermaid
from perco.testing.history import load
from perco.testing.isolation import check


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the history satisfies the isolation level, 1 if it does not, 2 if that cannot be decided."""
    parser = argparse.ArgumentParser(
        prog="python -m perco.testing",
        description="Decide whether a history is snapshot isolation; name and draw what is wrong.",
        epilog="A line of the file: "
        '{"id": 7, "client": "a", "begin": 0.10, "end": 0.12, "status": "ok", '
        '"ops": [["r", "x", []], ["a", "x", 3]]}. '
        "Registers have w instead of a. perco.testing.record() writes such files. "
        "Exit code: 0 it is, 1 it is not, 2 it cannot be decided.",
    )
    parser.add_argument("file", type=Path, help="the history, JSON lines; - for standard input")
    parser.add_argument("--serializable", action="store_true", help="ask for that instead")
    parser.add_argument("--no-real-time", action="store_true", help="let a transaction miss what had ended before it")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--mermaid", action="store_true", help="the first cycle as a flowchart in Mermaid's language")
    given = parser.parse_args(arguments)
    try:
        text = sys.stdin.read() if str(given.file) == "-" else given.file.read_text(encoding="utf-8")
        history = list(load(text.split("\n")))
        if not history:
            raise UsageError(f"{given.file}: no transactions, so there is nothing to decide")
        report = check(history, serializable=given.serializable, real_time=not given.no_real_time)
    except OSError as error:
        print(f"perco.testing: {given.file}: {error.strerror}", file=sys.stderr)
        return 2
    except (UsageError, UnicodeDecodeError) as error:
        print(f"perco.testing: {error}", file=sys.stderr)
        return 2
    cycles = [anomaly for anomaly in report.anomalies if anomaly.cycle]
    if given.json:
        print(json.dumps(asdict(report)))
    elif given.mermaid and cycles:
        print(mermaid(cycles[0]), end="")
    else:
        if given.mermaid:
            print("perco.testing: there is no cycle to draw", file=sys.stderr)
        edges = ", ".join(f"{count} {kind}" for kind, count in sorted(report.edges.items())) or "no dependencies"
        print(f"{report.transactions} transactions; {edges}; {report.unread} appends that no transaction read")
        wanted = "serializable" if given.serializable else "snapshot isolation"
        print(f"{wanted}: {'yes' if report.ok else 'NO'}")
        for anomaly in report.anomalies:
            print("\n" + draw(anomaly, history))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
