"""`python tools/fronts.py`: write the asyncio and the blocking front from the classes that run on trio.

`perco.aio` and `perco.sync` have the names, types and docstrings of `perco.Database` and `perco.Snapshot`. This writes
their `database.py` and `reading.py`, whose methods mostly pass a call on to the loop. A test checks that the files are
as this writes them (`--check`).

The rest of the fronts (attempts, blocks, held, observing, opening, scanning) is written by hand: its code runs on the
caller's side of the loop, and there the two fronts differ in more than `await`. A thread notes its writes, begins a
transaction with its first read, and cannot be stopped; a task of asyncio can be cancelled wherever it waits. The tests
compare the names and signatures of what is written by hand, too (`tests/component/fronts/test_twins.py`).
"""

from __future__ import annotations

import argparse
import ast
import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from perco.txn.operations import OPERATIONS

ROOT = Path(__file__).resolve().parents[1]
DATABASE, SNAPSHOT = ROOT / "perco/database/database.py", ROOT / "perco/txn/snapshot.py"
NOTE = "# Written by tools/fronts.py: change the class that it is written from, and run that again.\n"


@dataclass(frozen=True)
class Front:
    """Attributes:
    heads: the text of each class up to its methods, by name.
    own: bodies of the methods that do not just pass a call on, by name; with another docstring, or "".
    mapped: types of which the front has its own version, with their modules.
    """

    name: str
    blocking: bool
    heads: dict[str, str]
    own: dict[str, tuple[str, str]] = field(default_factory=dict)
    mapped: dict[str, str] = field(default_factory=dict)


def _heads(port: str, callers: str, readers: str, front: str) -> dict[str, str]:
    return {
        "Database": f'''class Database(Calling):
    """An open store, for {callers}. Made by `perco.{front}.open`; use it inside that block only.

    Attributes: `config`, the options that it was opened with; `schema`, its tables, columns and observers.
    """

    _of: databases.Database

    def __init__(self, port: {port}, of: databases.Database) -> None:
        super().__init__(port, of)
        self.schema: Schema = of.schema
        self.config: Options = of.config
        self._engine = inside(of).engine
        self._default = limited(of, None, None, None)
''',
        "Reading": f'''class Reading(Calling):
    """Reads of a snapshot, for {readers}."""
''',
    }


_ATTEMPTS = "return Attempts(self._port, Tries(self._engine, *self._default))"
_OPTIONS = "return Retrying(self._port, self._engine, *limited(self._of, attempts, timeout, isolation))"

AIO = Front(
    "aio",
    False,
    _heads("Guests", "the tasks of a loop", "asyncio tasks", "aio"),
    {
        "run": (
            """running = Retrying(self._port, self._engine, *self._default).run(function, *args, **kwargs)
running.__qualname__ = "Database.run"  # type: ignore[attr-defined]  # for Python's "never awaited" warning
return running""",
            """Run a function in a transaction and commit; run it again on a TransientError: see
`perco.Database.run`. The function runs in the calling task, and may await whatever asyncio can.
""",
        ),
        "attempts": (_ATTEMPTS, ""),
        "options": (
            _OPTIONS,
            """`run` and `attempts` with other limits: see `perco.Database.options`. Past the timeout the function,
or the block, is cancelled where it waits, and raises Unavailable.
""",
        ),
        "begin": (
            """of = begin_here(self._port, self._engine, isolation)
if of is None:
    of = await self._port.ask(self._of.begin, (), {"isolation": isolation})
return Transaction(self._port, self._engine, of)""",
            "",
        ),
        "transaction": ("return TransactionBlock(self.begin, isolation)", ""),
        "snapshot": (
            """block = self._of.snapshot(ts=ts, at=at, fresh=fresh, timeout=timeout)
write = "async with db.snapshot() as snap:"
return SnapshotBlock(self._port, block, lambda of: Snapshot(self._port, of), write)""",
            "",
        ),
        "snapshot_at": (
            """how = {"ts": ts, "at": at, "fresh": fresh, "timeout": timeout}
return Snapshot(self._port, await self._port.ask(self._of.snapshot_at, (), how))""",
            "",
        ),
        "pin": (
            """block = self._of.pin(name, lease_s=lease_s, ts=ts, at=at, owner=owner, keep=keep)
return Block(self._port, block, lambda of: PinnedSnapshot(self._port, of), "async with db.pin(...) as pin:")""",
            "",
        ),
        "worker": (
            """block = self._of.worker(concurrency=concurrency, scanners=scanners, options=options)
return Block(self._port, block, lambda of: WorkerHandle(self._port, of), "async with db.worker():")""",
            """Run the schema's observers while the block lasts: see `perco.Database.worker`. They run on trio;
declare functions that await asyncio with `@perco.aio.observer`.
""",
        ),
        "statistics": ("""return self._now("statistics", (), {})  # type: ignore[no-any-return]""", ""),
        "scan": ("return Scan(self._now({call}), lambda scan: self._ask_for(scan.fetch))", ""),
        "changes": (
            """of = self._now("changes", tables, {"since": since, "follow": follow})
return ChangeStream(of, lambda stream: self._ask_for(stream.fetch))""",
            "",
        ),
    },
    {
        **dict.fromkeys(("Attempts", "Retrying"), "perco.aio.attempts"),
        **dict.fromkeys(("Snapshot", "PinnedSnapshot", "Transaction"), "perco.aio.held"),
        **dict.fromkeys(("SnapshotBlock", "TransactionBlock", "WorkerHandle", "Block"), "perco.aio.blocks"),
        **dict.fromkeys(("Guests", "begin_here"), "perco.aio.guest"),
        "Calling": "perco.aio.calling",
        "Scan": "perco.aio.scanning",
        "ChangeStream": "perco.aio.following",
    },
)

SYNC = Front(
    "sync",
    True,
    _heads("Threads", "any number of threads", "threads", "sync"),
    {
        "run": (
            "return Retrying(self._port, self._engine, *self._default).run(function, *args, **kwargs)",
            """Run a function in a transaction and commit; run it again on a TransientError: see
`perco.Database.run`. The function runs in the calling thread; its transaction begins with its first read, or
else with the commit.
""",
        ),
        "attempts": (_ATTEMPTS, ""),
        "options": (
            _OPTIONS,
            """`run` and `attempts` with other limits: see `perco.Database.options`. A thread cannot be stopped: past
the timeout the function's next read raises Unavailable, or its commit does.
""",
        ),
        "begin": (
            """return Transaction(self._port, self._engine, self._ask("begin", (), {"isolation": isolation}))""",
            "",
        ),
        "transaction": ("return TransactionBlock(self.begin, isolation)", ""),
        "snapshot": (
            """block = self._of.snapshot(ts=ts, at=at, fresh=fresh, timeout=timeout)
return SnapshotBlock(self._port, block, lambda of: Snapshot(self._port, of), "with db.snapshot() as snap:")""",
            "",
        ),
        "snapshot_at": (
            """how = {"ts": ts, "at": at, "fresh": fresh, "timeout": timeout}
return Snapshot(self._port, self._ask("snapshot_at", (), how))""",
            "",
        ),
        "pin": (
            """block = self._of.pin(name, lease_s=lease_s, ts=ts, at=at, owner=owner, keep=keep)
return Block(self._port, block, lambda of: PinnedSnapshot(self._port, of), "with db.pin(...) as pin:")""",
            "",
        ),
        "worker": (
            """block = self._of.worker(concurrency=concurrency, scanners=scanners, options=options)
return Block(self._port, block, lambda of: WorkerHandle(self._port, of), "with db.worker():")""",
            """Run the schema's observers while the block lasts, on the store's loop: see `perco.Database.worker`. Plain
functions become observers with `@perco.sync.observer`.
""",
        ),
        "scan": ("return Scan(self._scan_from({call}), self._settle, lambda scan: self._fetch(scan))", ""),
        "changes": (
            """of = self._ask("changes", tables, {"since": since, "follow": follow})
return ChangeStream(of, lambda stream: self._port.ask(stream.fetch, (), {}))""",
            "",
        ),
    },
    {
        **dict.fromkeys(("Attempts", "Retrying"), "perco.sync.attempts"),
        **dict.fromkeys(("Snapshot", "PinnedSnapshot", "Transaction"), "perco.sync.held"),
        **dict.fromkeys(("SnapshotBlock", "TransactionBlock", "WorkerHandle", "Block"), "perco.sync.blocks"),
        "Threads": "perco.sync.threads",
        "Calling": "perco.sync.calling",
        "Scan": "perco.sync.scanning",
        "ChangeStream": "perco.sync.following",
    },
)

# Names that the written bodies use, and where they come from.
USED = {
    "databases": "perco.database",
    "inside": "perco.database.inside",
    "Tries": "perco.fronts.tries",
    "limited": "perco.fronts.tries",
    "Options": "perco.database.options",
    "Schema": "perco.schema.schema",
    "Coroutine": "collections.abc",
}
PROPERTIES = {"schema"}  # plain attributes in the fronts


def written(front: Front, source: Path, kind: str, new: str, title: str) -> str:
    """The text of a file: the class `new` of a front, from the class `kind` of `source`."""
    tree = ast.parse(source.read_text())
    there = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    methods = [_method(front, node) for node in _public(there)]
    body = front.heads[new] + "\n" + "\n".join(methods)
    variables = "".join(f'{name} = {made}("{name}")\n' for name, made in _variables(tree) if _uses(body, name))
    opening = NOTE + f'"""{title}"""\n\nfrom __future__ import annotations\n\n' + _imports(front, tree, body)
    return _formatted(f"{opening}\n{variables}\n\n{body}")


def _public(kind: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in kind.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not node.name.startswith("_") and node.name not in PROPERTIES:
            yield node


def _method(front: Front, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    body, doc = front.own.get(node.name, ("", ""))
    args, is_block = copy.deepcopy(node.args), bool(node.decorator_list)
    returns = ast.unparse(node.returns) if node.returns is not None else "None"
    waits = isinstance(node, ast.AsyncFunctionDef) and not is_block
    if is_block:
        returns = "Block[" + re.sub(r"AsyncIterator\[(.*)\]", r"\1", returns) + "]"
    prefix = "def"
    if waits and front.blocking is False:
        if "await " in body:
            prefix = "async def"
        else:
            returns = f"Coroutine[Any, Any, {returns}]"
    if front.blocking and node.name == "run":
        returns = re.sub(r"Coroutine\[Any, Any, (.*)\]", r"\1", returns)
    shape = ast.unparse(args)
    if front.blocking:
        shape = shape.replace("Awaitable[T]", "T")
    call = _call(node)
    if not body:
        ask = "_operate" if node.name in OPERATIONS else "_ask"  # T10: an interrupt has to say what became of it
        body = f"return self.{ask}({call})"
        if front.blocking:
            body = (
                f"self.{ask}({call})" if returns == "None" else f"result: {returns} = self.{ask}({call})\nreturn result"
            )
    text = doc.strip("\n") or ast.get_docstring(node, clean=True) or ""
    lines = [f"{prefix} {node.name}({shape}) -> {returns}:", *_indented(_docstring(front, text)), *_indented(body)]
    return "\n".join(_indented("\n".join(lines))).replace("{call}", call) + "\n"


def _call(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Name, positional and named arguments, as `_ask` takes them."""
    names = [arg.arg for arg in node.args.args[1:]]
    named = ", ".join(f'"{arg.arg}": {arg.arg}' for arg in node.args.kwonlyargs)
    positional = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    return f'"{node.name}", {positional}, {{{named}}}'


def _docstring(front: Front, text: str) -> str:
    if front.blocking:
        text = re.sub(
            r"`[^`\n]*`|^    .*$", lambda code: re.sub(r"\b(async|await) ", "", code[0]), text, flags=re.MULTILINE
        )
    return f'"""{text}"""' if "\n" not in text.strip() else f'"""{text.rstrip()}\n"""'


def _indented(text: str) -> list[str]:
    return [f"    {line}" if line else "" for line in text.splitlines()]


def _uses(body: str, name: str) -> bool:
    return re.search(rf"(?<![\w.\"])(?<!def ){name}\b", re.sub(r'""".*?"""', "", body, flags=re.DOTALL)) is not None


def _variables(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made, name = node.value.func, node.targets[0]
            if isinstance(made, ast.Name) and made.id in {"TypeVar", "ParamSpec"} and isinstance(name, ast.Name):
                yield name.id, made.id


def _imports(front: Front, tree: ast.Module, body: str) -> str:
    known: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            known |= {alias.asname or alias.name: node.module for alias in node.names}
    known |= USED | front.mapped | {"TypeVar": "typing", "ParamSpec": "typing", "Any": "typing"}
    names = {name for name in known if _uses(body, name)}
    names |= {made for name, made in _variables(tree) if _uses(body, name)}
    lines = []
    for name in sorted(names - {"annotations"}):
        what = "database as databases" if name == "databases" else name
        lines.append(f"from {known[name]} import {what}\n")
    return "".join(lines)


def _formatted(text: str) -> str:
    ruff = Path(sys.executable).with_name("ruff")
    command = str(ruff) if ruff.exists() else "ruff"
    config = ("--config", str(ROOT / "pyproject.toml"), "--stdin-filename", str(ROOT / "perco/written.py"), "-")
    sorted_text = subprocess.run(
        [command, "check", "--quiet", "--select", "I", "--fix", *config],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return subprocess.run(
        [command, "format", "--quiet", *config], input=sorted_text, capture_output=True, text=True, check=True
    ).stdout


def files() -> dict[Path, str]:
    """Each file, and the text that it must have."""
    out = {}
    for front, of in ((AIO, "for asyncio"), (SYNC, "for threads")):
        folder = ROOT / "perco" / front.name
        out[folder / "database.py"] = written(front, DATABASE, "Database", "Database", f"An open store, {of}.")
        out[folder / "reading.py"] = written(front, SNAPSHOT, "Snapshot", "Reading", f"Reads of a snapshot, {of}.")
    return out


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 with `--check` if a file is out of date."""
    parser = argparse.ArgumentParser(prog="python tools/fronts.py", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; tell which files would change")
    given = parser.parse_args(arguments)
    changed = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    for path in changed:
        print(path.relative_to(ROOT))
        if not given.check:
            path.write_text(files()[path])
    return 1 if given.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
