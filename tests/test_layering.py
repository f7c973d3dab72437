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
    "arrow",
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
    "backup",
    "fronts",
    "sync",
    "aio",
    "behind",
    "metrics",
    "otel",
    "views",
    "sources",
    "langchain",
    "llamaindex",
    "spark",
    "crossover",
    "testing",
    "embeddings",
    "webindex",
    "cli",
]

# The commands of the web index belong to the command line, though they lie with what they are about.
COMMANDS = {
    Path("webindex/cli.py"),
    Path("webindex/demo.py"),
    Path("embeddings/cli.py"),
    Path("embeddings/demo.py"),
}

# Who may import what from outside: the core stands on three packages.
CORE = {"trio", "msgpack", "lmdb"}
ARROW = {"columnar.py", "scan.py", "scanning.py"}  # the first is imported on demand, the others name types of it

# Storage offers the layers above what `perco/storage/__init__.py` exports. These modules also need what lies inside of
# it: the files of a folder, and how the writes that wait at a tablet are sent again after its split.
INSIDES = ("folder", "lmdb_engine", "lmdb_tablet", "tablet")
REACHING_INSIDE = {
    "serve/opening.py folder.is_store": "a program may ask that none is made",
    "serve/opening.py folder.shared_by_owner": "a folder is opened: wait only for an owner that serves others",
    "serve/opening.py lmdb_engine.PidTaken": "a reader in another container reads through the owner then",
    "tablets/local.py folder.tablet_path": "a store is opened: each of its tablets lies in a folder of its own",
    "tablets/local.py folder.doubt_of": "the owner tells its clients whether the newest writes may be lost",
    "serve/tablets.py folder.tablet_path": "a tablet server opens the tablets that it was given",
    "serve/processes.py folder.tablet_path": "the owner opens for reading the tablets that tablet servers write to",
    "tablets/local.py tablet.Resubmit": "the type of an argument with which a tablet is made",
    "serve/processes.py tablet.Resubmit": "the same, of a tablet that a tablet server writes to",
    "serve/served_tablet.py tablet.Resubmit": "the same",
    "backup/owners.py folder.Folder": "to take a backup of a closed store, it is owned for a moment",
    "backup/owners.py folder.shared_by_owner": "only an owner that serves others can be asked to park its writers",
    "backup/restoring.py folder.make_store": "the folder of a restored store is made outside of a store",
    "backup/restoring.py folder.tablet_path": "and so are the folders of its tablets",
    "backup/taking.py folder.tablet_path": "the tablets' files are opened beside the owner",
    "cli/checking.py folder.accept": "perco check --accept removes that mark, so that the folder opens again",
    "cli/checking.py folder.doubt_of": "perco check shows the mark of writes that may be lost",
    "cli/status.py folder.FORMAT": "perco status shows the format of the files",
    "testing/disk.py tablet.Resubmit": "a tablet of the simulation is made like any other",
    "testing/spread.py tablet.Resubmit": "the same",
    "testing/sweep.py tablet.Tablet": "the type of the tablets that the sweep has noted",
}

# Tablets differ in what can be done with their files. These modules ask which kind they have; all others call a tablet.
TABLETS = {"Tablet", "MemoryTablet", "LmdbTablet", "ServedTablet", "DamagedTablet", "DiskTablet"}
TELLING_TABLETS_APART = {
    "tablets/local.py": "a split divides memory, or copies files; only LMDB has files to compact",
    "tablets/compactor.py": "only LMDB has files to compact",
    "serve/processes.py": "all tablets of this backend are of one kind; the check is for the type checker",
    "cli/checking.py": "only LMDB has files whose reading may kill the process; damaged ones were set aside",
}


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
                assert parts[0] != "perco" or layer in {"spark", "embeddings", "webindex", "cli"}, (
                    f"{path} imports {name}"
                )
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
            public = not rest or exported or rest.split(".")[0] in {"webindex", "errors", "options", "spark", "views"}
            screen = commands and rest.startswith(("cli.", "embeddings."))
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
        if layer_of(path) in {"spark", "embeddings", "webindex", "cli", "__main__"}:
            continue
        for name in imports(tree):
            top = name.split(".")[0]
            if (top, layer_of(path)) == ("psycopg", "postgresql"):
                continue  # for type checkers only: `connection.libpq` imports it when a store is opened
            if top in {"numpy", "pyarrow"} and layer_of(path) == "arrow":
                continue  # which is imported when a program asks for Arrow
            if top == "pyarrow" and path.name in ARROW:
                continue
            if top == "langchain_core" and layer_of(path) == "langchain":
                continue
            if top == "llama_index" and layer_of(path) == "llamaindex":
                continue
            if (top, path.name) in {
                ("numpy", "near.py"),
                ("rensa", "near.py"),
                ("numpy", "vectors.py"),
                ("watchdog", "noticing.py"),
                ("pyspark", "on_spark.py"),
                ("cronsim", "schedules.py"),
                ("prometheus_client", "metrics.py"),
                ("opentelemetry", "otel.py"),
            }:
                continue  # imported when a program declares near-duplicates or cron expressions, asks for metrics ...
            assert top in CORE | {"perco"} | set(sys.stdlib_module_names), f"{path} imports {name}"


def test_only_postgresql_knows_psycopg() -> None:
    for path, tree in modules():
        for name in imports(tree):
            assert name.split(".")[0] != "psycopg" or layer_of(path) == "postgresql", f"{path} imports {name}"


def test_only_storage_knows_lmdb() -> None:
    for path, tree in modules():
        for name in imports(tree):
            assert name.split(".")[0] != "lmdb" or path.parent.name == "storage", f"{path} imports {name}"


def test_what_lies_inside_of_storage_is_imported_for_a_reason() -> None:
    found = set()
    for path, tree in modules():
        if layer_of(path) == "storage":
            continue
        for name in imports(tree):
            inside = name.removeprefix("perco.storage.")
            if inside != name and inside.partition(".")[0] in INSIDES:
                found.add(f"{path.relative_to(ROOT)} {inside}")
    assert found == set(REACHING_INSIDE)


def types_asked_for(tree: ast.Module) -> set[str]:
    """The names of the types that a module compares the type of an object with."""
    named: list[ast.expr] = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kind]):
                named.append(kind)
            case ast.MatchClass(cls=kind):
                named.append(kind)
    parts = [part for kind in named for part in ast.walk(kind)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names | {part.attr for part in parts if isinstance(part, ast.Attribute)}


def test_types_asked_for_are_found() -> None:
    text = """
isinstance(store, here.LocalRowStore | int) or issubclass(kind, (LocalTasks, str))
match store:
    case LocalStore():
        pass
"""
    assert types_asked_for(ast.parse(text)) >= {"LocalRowStore", "LocalTasks", "LocalStore"}


def test_no_module_asks_whether_a_store_is_local() -> None:
    for path, tree in modules():
        local = {name for name in types_asked_for(tree) if name.startswith("Local")}
        assert not local, f"{path} looks at the type: {local}; test for a capability instead"


def test_tablets_are_told_apart_for_a_reason() -> None:
    found = {str(path.relative_to(ROOT)) for path, tree in modules() if types_asked_for(tree) & TABLETS}
    assert found == set(TELLING_TABLETS_APART)


def private_names(tree: ast.Module) -> set[str]:
    """The private names that a module gives to functions, classes, fields and variables."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name("self")) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Constant(value=str(name)):  # in __slots__
                found.add(name)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def private_uses(tree: ast.Module) -> set[str]:
    """The private attributes that a module uses of any object but `self`."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("self" | "cls")):
                pass
            case ast.Attribute(attr=name) if name.startswith("_") and not name.startswith("__"):
                found.add(name)
    return found


# Private by their names, but for everybody: those of named tuples, and of Python's own modules.
OF_PYTHON = {"_asdict", "_replace", "_exit", "_current_frames"}


def test_private_uses_are_found() -> None:
    uses = private_uses(ast.parse("def f(self, txn):\n self._mine = txn._theirs.__class__\n txn._ack._body = 1"))
    assert uses == {"_theirs", "_ack", "_body"}
    text = "class A:\n __slots__ = ('_slot',)\n _field: int\n def _do(self): self._made = _there = 1"
    assert private_names(ast.parse(text)) == {"_slot", "_field", "_do", "_made", "_there"}


def test_what_is_private_is_used_in_its_package_alone() -> None:
    # `txn/inside.py`, `txn/runs.py` and `database/inside.py` give what packages above need.
    own: dict[str, set[str]] = {}
    for path, tree in modules():
        own.setdefault(layer_of(path), set()).update(private_names(tree))
    for path, tree in modules():
        if layer_of(path) != "testing":  # it breaks the product on purpose
            strange = private_uses(tree) - own[layer_of(path)] - OF_PYTHON
            assert not strange, f"{path} uses what is private to another package: {strange}"


def test_only_spark_knows_spark() -> None:
    for path, tree in modules():
        for name in imports(tree):
            known = name.split(".")[0] == "pyspark" or name.startswith("perco.spark")
            assert not known or layer_of(path) == "spark" or path.name == "on_spark.py", f"{path} imports {name}"


def test_storage_never_learns_what_a_lock_is() -> None:
    # The one seam: rows of cells, checks and writes. Names of groups are the only trace of the protocol there.
    for path, _ in modules():
        if layer_of(path) == "storage" and path.name in {"row.py", "tablet.py", "lmdb_engine.py", "engine.py"}:
            assert "LOCK" not in path.read_text(), path
