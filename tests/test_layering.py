"""Imports point down only; nothing below ever calls up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import perco

ROOT = Path(perco.__file__).parent

# Low to high. A layer may import itself and what stands before it.
LAYERS = [
    "errors",
    "settings",
    "naming",
    "outcome",
    "blocks",
    "tuning",
    "rpc",
    "storage",
    "protocol",
    "schema",
    "postgresql",
    "bigtable",
    "clock",
    "txn",
    "tablets",
    "history",
    "notify",
    "check",
    "database",
    "serve",
    "copying",
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

# Who may import what from outside: the core stands on three packages.
CORE = {"trio", "msgpack", "lmdb"}


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(ROOT.rglob("*.py"))]


def imports(tree: ast.Module) -> Iterator[str]:
    """Everything imported, inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "write imports out in full"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_between_packages_only_point_down() -> None:
    for path, tree in modules():
        layer = layer_of(path)
        if layer in {"__init__", "__main__", "options"}:
            continue  # the facade sees everything
        for name in imports(tree):
            parts = name.split(".")
            if parts[0] != "perco" or len(parts) < 2 or parts[1] not in LAYERS:
                # `import perco` is the facade: for those above the library, as for users.
                assert parts[0] != "perco" or layer in {"spark", "webindex", "cli"}, f"{path} imports {name}"
                continue
            high = "cli" if path.relative_to(ROOT) in COMMANDS else layer
            assert LAYERS.index(parts[1]) <= LAYERS.index(high), f"{path} imports {name}"


def test_the_web_index_uses_the_public_api_alone() -> None:
    for path, tree in modules():
        if layer_of(path) != "webindex":
            continue
        commands = path.relative_to(ROOT) in COMMANDS
        for name in imports(tree):
            package, _, rest = name.partition(".")
            exported = isinstance(vars(perco).get(rest), (type, perco.Codec))
            public = not rest or exported or rest.split(".")[0] in {"webindex", "errors", "options", "spark"}
            screen = commands and rest.startswith("cli.")
            assert package != "perco" or public or screen, f"{path} imports {name}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph: dict[str, set[str]] = {}
    known = {module_of(path) for path, _ in modules()}
    for path, tree in modules():
        module = module_of(path)
        if module in {"perco", "perco.options"}:
            continue  # the facade imports all, and those above the library import it
        found = {name if name in known else name.rpartition(".")[0] for name in imports(tree)}
        graph[module] = (found & known) - {"perco", "perco.options", module}
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the circle


def test_the_core_stands_on_trio_msgpack_and_lmdb_alone() -> None:
    import sys

    for path, tree in modules():
        if layer_of(path) in {"spark", "webindex", "cli", "__main__"}:
            continue
        for name in imports(tree):
            top = name.split(".")[0]
            if (top, layer_of(path)) == ("psycopg", "postgresql"):
                continue  # for type checkers only: `connection.libpq` imports it when a store is opened
            assert top in CORE | {"perco"} | set(sys.stdlib_module_names), f"{path} imports {name}"


def test_only_postgresql_knows_psycopg() -> None:
    for path, tree in modules():
        for name in imports(tree):
            assert name.split(".")[0] != "psycopg" or layer_of(path) == "postgresql", f"{path} imports {name}"


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
