"""Imports point down only; nothing below ever calls up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import perco

ROOT = Path(perco.__file__).parent

# Low to high. A layer may import itself and what stands before it.
LAYERS = [
    "errors",
    "options",
    "naming",
    "tuning",
    "rpc",
    "storage",
    "txn",
    "notify",
    "serve",
    "fronts",
    "sync",
    "aio",
    "spark",
    "testing",
    "webindex",
    "cli",
]

# The commands of the web index belong to the command line, though they lie with what they are about.
COMMANDS = {Path("webindex/cli.py"), Path("webindex/demo.py")}

# Within a package a module may import those before it.
ORDER = {
    "rpc": ["framing", "channel", "crossing", "link", "addresses", "peer"],
    "serve": [
        *("messages", "pulse", "beating", "tasks", "wakes", "sessions", "tokens", "children", "door", "tablets"),
        *("processes", "together", "elsewhere", "server", "remote", "database", "opening", "lending"),
    ],
    "storage": [
        *("cells", "keys", "engine", "row", "call", "pages", "lmdb_engine", "handover", "splitting", "tablet"),
        *("damaged", "rowstore", "batching"),
        "folder",
    ],
    "txn": [
        *(
            "records",
            "codecs",
            "retention",
            "snapshot",
            "reads",
            "own_rows",
            "prefetch",
            "mutations",
            "failed",
            "commit",
            "recovery",
            "timestamps",
        ),
        *("fates", "schema", "catalogue", "holds", "pins", "oracle", "background", "entered", "chain", "validation"),
        *(
            "driver",
            "local",
            "splitter",
            "compactor",
            "beside",
            "sweeper",
            "loopwatch",
            "heartbeat",
            "backfill",
            "vacuum",
            "image",
            "repairs",
        ),
        "examine",
        *("across", "system", "check", "repair", "scan", "transaction", "past", "turns", "attempts", "client"),
    ],
    "testing": [
        *(
            "history",
            "isolation",
            "drawing",
            "faults",
            "machine",
            "plan",
            "growth",
            "workloads",
            "processes",
            "meters",
            "errands",
        ),
        *("runs", "embedded", "network", "disk", "spread", "served", "simulation"),
        *("shrink", "simulate", "sweep", "__main__"),
    ],
    "notify": [
        *("claim", "rowlocks", "backoff", "delays", "failing", "outputs", "worker", "scanner"),
        *("failures", "observers", "tracing", "database"),
    ],
    "fronts": ["lookup", "portal", "tries"],
    "sync": ["threads", "held", "attempts", "observing", "database", "opening"],
    "aio": ["guest", "limits", "held", "attempts", "observing", "database", "opening"],
    "spark": [
        *("keys", "ledger", "partition", "streaming", "store", "types", "ranges"),
        *("sink", "source", "loading", "draining"),
    ],
}

# Who may import what from outside: the core stands on three packages.
CORE = {"trio", "msgpack", "lmdb"}


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    """Everything imported at run time, inside functions too; what is under TYPE_CHECKING is not."""
    hidden = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in hidden:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports out in full"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_between_packages_only_point_down() -> None:
    for path, tree in modules():
        layer = layer_of(path)
        if layer in {"__init__", "__main__"}:
            continue  # the facade sees everything
        for name in imports(tree):
            parts = name.split(".")
            if parts[0] != "perco" or len(parts) < 2 or parts[1] not in LAYERS:
                # `import perco` is the facade: for those above the library, as for users.
                assert parts[0] != "perco" or layer in {"spark", "webindex", "cli"}, f"{path} imports {name}"
                continue
            high = "cli" if path.relative_to(ROOT) in COMMANDS else layer
            assert LAYERS.index(parts[1]) <= LAYERS.index(high), f"{path} imports {name}"


def test_imports_within_a_package_only_point_down() -> None:
    for path, tree in modules():
        layer = layer_of(path)
        if layer not in ORDER or path.name == "__init__.py":
            continue
        order = ORDER[layer]
        assert path.stem in order, f"give {path} a place in ORDER"
        for name in imports(tree):
            parts = name.split(".")
            if parts[:2] == ["perco", layer] and len(parts) > 2 and parts[2] in order:
                assert order.index(parts[2]) < order.index(path.stem), f"{path} imports {name}"


def test_the_core_stands_on_trio_msgpack_and_lmdb_alone() -> None:
    import sys

    for path, tree in modules():
        if layer_of(path) in {"spark", "webindex", "cli", "__main__"}:
            continue
        for name in imports(tree):
            top = name.split(".")[0]
            assert top in CORE | {"perco"} | set(sys.stdlib_module_names), f"{path} imports {name}"


def test_only_storage_knows_lmdb() -> None:
    for path, tree in modules():
        for name in imports(tree):
            assert name.split(".")[0] != "lmdb" or path.parent.name == "storage", f"{path} imports {name}"


def test_only_spark_knows_spark() -> None:
    for path, tree in modules():
        for name in imports(tree):
            known = name.split(".")[0] in {"pyspark", "pyarrow"} or name.startswith("perco.spark")
            assert not known or layer_of(path) == "spark" or path.name == "on_spark.py", f"{path} imports {name}"


def test_storage_never_learns_what_a_lock_is() -> None:
    # The one seam: rows of cells, checks and writes. Names of groups are the only trace of the protocol there.
    for path, _ in modules():
        if layer_of(path) == "storage" and path.name in {"row.py", "tablet.py", "lmdb_engine.py", "engine.py"}:
            assert "LOCK" not in path.read_text(), path
