"""`python -m bench NAME [--quick] [--json FILE]`: one module per figure or comparison."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from bench.harness import Run

BENCHES = {
    "overhead": "what transactions cost over bare LMDB (the paper's figure 8)",
    "observers": "latency and throughput of a chain of three observers",
    "arrow": "how fast rows become Arrow columns, beside rows by hand, SQLite and Parquet",
    "fronts": "what a call costs from trio, from asyncio, from threads",
    "starve": "whether a slow observer holds up a fast one",
    "lag": "what it costs to know how far observers lag behind, while a million changes wait",
    "contention": "what conflicts cost, and what signals save",
    "engine": "an event loop or a thread per request, against one served store",
    "oracle": "how many timestamps a served oracle hands out",
    "prefetch": "how many row reads are saved by reading ahead what is likely to be read later",
    "failover": "what clients notice when processes of a served store die (the paper's figure 10)",
    "scaling": "what a transaction costs with one tablet server and with two, and what a thousand might do",
    "backup": "what a backup costs those who write meanwhile, and whether it is right",
    "split": "how long writes wait while a tablet is split",
    "window": "what a client gains by waiting a little before it asks",
    "peers": "the same work on SQLite, ZODB, PostgreSQL and procrastinate",
    "postgresql": "transactions and observers on PostgreSQL, against SQL and a task queue on the same server",
    "bigtable": "calls, CPU time and latency of a transaction on a Bigtable emulator",
    "brokerage": "a load after TPC-E on every store, beside SQL by hand (the paper's figure 9)",
    "space": "what overwritten cells take, with a vacuum, beside a fresh store",
    "spark_load": "what loading through Spark costs, and what reading back",
    "figure7": "how long documents wait to be clustered: perco, Spark's batch and streaming (figure 7)",
    "views": "what a change in a large group costs, and the web index on views beside that by hand",
    "changes": "what a log of changes costs the writes, how fast it is read, and whether following it is right",
    "near": "how many near-duplicates are found, and what a document costs that comes, changes or goes",
    "derive": "one function of many documents kept up to date, beside CocoIndex, Pathway and DBOS",
    "webindex": "what a page costs in the web index, while it grows to 100 000 pages",
    "scanners": "why scanners teleport, in virtual time (the paper's buses) and in worker processes",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="perco's benchmarks. Each prints a table, the bars that its figures should keep, a line that says "
        "which of\nthem are missed and, as its last line, RESULT and JSON. The exit code is 0 even if bars are missed: "
        "many\ndepend on the machine.",
        epilog="\n".join(f"  {name:<11}{what}" for name, what in BENCHES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(BENCHES), metavar="NAME", help="one of those below")
    parser.add_argument("--quick", action="store_true", help="three rounds of the judged cells only, within a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    parser.add_argument(
        "--folder", default=".", metavar="DIR", help="measure the disk that this folder lies on (default: here)"
    )
    if len(sys.argv) == 1:
        parser.print_help()
        raise SystemExit(2)
    arguments = parser.parse_args()
    if not Path(arguments.folder).is_dir():
        parser.error(f"--folder: there is no folder {arguments.folder}")
    module = importlib.import_module(f"bench.{arguments.name}")
    module.main(Run(arguments.name, arguments))


if __name__ == "__main__":
    main()
