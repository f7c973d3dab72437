"""A crawler that runs as a process of its own and writes what it finds to a pipe.

    python -m perco.webindex.crawl [--mine PACKAGE] [--html DIR] [--warc FILE ...] [--limit N] [--out FILE]

It is a process because its default source, the documentation of the running Python, has to import every
module of the standard library to read it: what a module prints, changes, starts or breaks stays here, and
the index that reads the stream sees only bytes. Saved pages and web archives come through the same stream.

The stream is msgpack maps one after the other: a page as `pages.pack` writes it, `{"skipped": name, "why":
reason}`, `{"noted": name, "why": reason}` for a page that was delivered in part, and at the very end `{"done":
pages}`. A stream without that end is a crawl that died, and its reader says so. The same source gives the
same bytes in every run: no addresses of objects, no paths of this machine, nothing of its environment.
"""

import argparse
import faulthandler
import html
import http.client
import importlib
import importlib.util
import inspect
import os
import pkgutil
import pydoc
import re
import signal
import stat
import sys
import sysconfig
import tempfile
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO, TypeVar
from urllib.parse import quote

import msgpack
from warcio.archiveiterator import ArchiveIterator
from warcio.exceptions import ArchiveLoadFailed

from perco.webindex.pages import Page, canonical_url, pack, page_of
from perco.webindex.synthetic import SyntheticWeb

# Names that no registry will ever hand out: these pages are nowhere on the web.
DOCS_URL = "https://docs.python.invalid/"
HTML_URL = "https://pages.invalid/"


@dataclass(frozen=True, slots=True)
class CrawlLimits:
    """What the crawler allows one page and one module."""

    body_bytes_max: int = 4 * 1024 * 1024
    """The rest of a longer body is left out, and that is noted."""
    module_seconds: float = 10.0
    """For the import of one module, and again for the making of each of its pages."""
    patience: float = 3.0
    """After this many times `module_seconds` a module that cannot be interrupted ends the crawl."""
    chunk_bytes: int = 64 * 1024
    """How much is read at a time from files that may hold anything."""


DEFAULT_LIMITS = CrawlLimits()


# --------------------------------------------------------------------------------------------- records


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that gave no page."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Noted:
    """A page that was delivered, but not as it is."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a crawl that got to its end."""

    pages: int


Found = Page | Skipped | Noted
Record = Found | Done


class CrawlError(Exception):
    """The stream is not that of a whole crawl."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What the reader of a crawl accepts from the crawler."""

    record_bytes_max: int = 8 * 1024 * 1024
    chunk_bytes: int = 64 * 1024


DEFAULT_READ_LIMITS = ReadLimits()


def encode(record: Record) -> bytes:
    """The record as it stands in the stream."""
    if isinstance(record, Page):
        return pack(record)
    if isinstance(record, Done):
        return bytes(msgpack.packb({"done": record.pages}))
    kind = "skipped" if isinstance(record, Skipped) else "noted"
    return bytes(msgpack.packb({kind: record.name, "why": record.why}))


def _decode(fields: object) -> Record:
    match fields:
        case {"done": int(pages), **rest} if not rest:
            return Done(pages)
        case {"skipped": str(name), "why": str(why), **rest} if not rest:
            return Skipped(name, why)
        case {"noted": str(name), "why": str(why), **rest} if not rest:
            return Noted(name, why)
    try:
        return page_of(fields)
    except ValueError as error:
        raise CrawlError(f"the crawler sent a record of no known kind: {error}") from error


class CrawlDecoder:
    """Turns the bytes of a crawl into records as they come in, whatever the size of the pieces.

    For a reader that waits for the pipe in its own way: call `feed` with what was read, and `finish` at the
    end of the stream. It never holds more than one record and one piece.
    """

    def __init__(self, limits: ReadLimits = DEFAULT_READ_LIMITS) -> None:
        self._limits = limits
        self._pages = 0
        self._done: Done | None = None
        self._unpacker = msgpack.Unpacker(max_buffer_size=limits.record_bytes_max + limits.chunk_bytes)

    def feed(self, data: bytes | bytearray) -> Iterator[Record]:
        """The records that these bytes complete."""
        view = memoryview(data)
        for start in range(0, len(data), self._limits.chunk_bytes):
            try:
                self._unpacker.feed(view[start : start + self._limits.chunk_bytes])
            except msgpack.BufferFull as error:
                limit = self._limits.record_bytes_max
                raise CrawlError(f"the crawler sent a record of more than {limit} bytes") from error
            yield from self._complete()

    def _complete(self) -> Iterator[Record]:
        while True:
            try:
                fields = self._unpacker.unpack()
            except msgpack.OutOfData:
                return
            except (ValueError, msgpack.UnpackException) as error:
                raise CrawlError(f"the crawler sent what is not msgpack: {error}") from error
            yield self._checked(_decode(fields))

    def _checked(self, record: Record) -> Record:
        if self._done is not None:
            raise CrawlError("the crawler went on after it had said it was done")
        if isinstance(record, Page):
            self._pages += 1
        elif isinstance(record, Done):
            if record.pages != self._pages:
                raise CrawlError(f"the crawler counted {record.pages} pages, but {self._pages} came through")
            self._done = record
        return record

    def finish(self) -> None:
        """Call at the end of the stream: CrawlError unless the crawl is whole."""
        if self._done is None:
            raise CrawlError(f"the crawler stopped half-way, after {self._pages} pages: it never said done")


def read_crawl(stream: BinaryIO, limits: ReadLimits = DEFAULT_READ_LIMITS) -> Iterator[Record]:
    """The records of a crawl, read from a file or pipe; CrawlError when it is not whole."""
    decoder = CrawlDecoder(limits)
    while data := stream.read(limits.chunk_bytes):
        yield from decoder.feed(data)
    decoder.finish()


def write_crawl(records: Iterable[Found], out: BinaryIO, limit: int | None = None) -> int:
    """Writes the records and the end; returns the number of pages. Stops after `limit` pages."""
    pages = 0
    for record in records:
        if isinstance(record, Page):
            if pages == limit:
                break
            pages += 1
        out.write(encode(record))
    out.write(encode(Done(pages)))
    out.flush()
    return pages


# --------------------------------------------------------------------------------------------- Python documentation

# Importing these opens a browser or prints a poem, or there is nothing in them but tests and demos.
_NOT_IMPORTED = frozenset({"__main__", "antigravity", "idlelib", "test", "this", "turtledemo"})
_NOT_IMPORTED_PARTS = frozenset({"__main__", "conftest", "demo", "demos", "idle_test", "test", "tests"})
_NOT_IMPORTED_WHY = "not imported: it holds tests or demos, or opens a window"
_STDERR = 2
_SHOWN_VALUES = (bool, int, float, complex, str, bytes, type(None))
_SHOWN_VALUE_CHARS = 200
_ADDRESS = re.compile(r"\s+at\s+0x[0-9A-Fa-f]+")


class _TooSlow(BaseException):
    """Raised by the timer. No `except Exception` of a module may stop it."""


def _too_slow(signum: int, frame: object) -> NoReturn:
    raise _TooSlow


@contextmanager
def _docstrings_only() -> Iterator[None]:
    """Keeps pydoc from reading the comments above what has no docstring: that parses every source file over
    and over, for two thirds of the time of a crawl."""
    getcomments = inspect.getcomments
    inspect.getcomments = lambda object: None
    try:
        yield
    finally:
        inspect.getcomments = getcomments


def _link(target: str, text: str) -> str:
    return f'<a href="/{target}">{text}</a>'


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


class _Html(pydoc.HTMLDoc):
    """pydoc's HTML with links to the pages of this crawl, and only with values that are the same everywhere.

    pydoc prints what a name stands for as it is at that moment, be it the environment with its secrets.
    """

    def __init__(self, scrub: Callable[[str], str]) -> None:
        self._scrub = scrub

    def classlink(self, object: Any, modname: str) -> str:
        name, module = object.__name__, sys.modules.get(object.__module__)
        shown = pydoc.classname(object, modname)
        if module is None or name.startswith("_") or getattr(module, name, None) is not object:
            return shown
        return _link(f"{module.__name__}.{name}", shown)

    def modulelink(self, object: Any) -> str:
        return _link(object.__name__, object.__name__)

    def namelink(self, name: str, *dicts: Any) -> str:
        for targets in dicts:
            target = targets.get(name)
            if target is not None and not target.startswith("#"):
                return _link(target, name)
        return name

    def escape(self, text: str) -> str:
        return html.escape(text, quote=False)

    def preformat(self, text: str) -> str:
        # pydoc makes every space a &nbsp;, which is most of its bytes.
        return self.escape(text.expandtabs()).replace("\n", "<br>\n")

    def docother(self, object: Any, name: str | None = None, mod: str | None = None, *ignored: Any) -> str:
        value = self.escape(self._shown(object))
        return f"<strong>{name}</strong> = {value}" if name else value

    def _shown(self, value: object) -> str:
        if type(value) not in _SHOWN_VALUES:
            return f"<{type(value).__name__} object>"
        # Before it is shortened: half a path would not be known for one.
        return pydoc.cram(self._scrub(repr(value)), _SHOWN_VALUE_CHARS)


def _own_paths() -> list[tuple[str, str]]:
    """Folders of this machine that turn up in documentation, and what stands there instead."""
    named = dict.fromkeys(sys.path, "site-packages") | {
        sysconfig.get_path("stdlib"): "lib/python",
        sysconfig.get_path("platstdlib"): "lib/python",
        sysconfig.get_path("purelib"): "site-packages",
        sysconfig.get_path("platlib"): "site-packages",
        os.path.dirname(sys.executable): "bin",
        sys.prefix: "prefix",
        sys.base_prefix: "prefix",
        sys.exec_prefix: "prefix",
        os.path.expanduser("~"): "~",
        os.getcwd(): "tmp",
    }
    both = {where: instead for path, instead in named.items() for where in (path, os.path.realpath(path))}
    # "/usr" is the prefix of many a Python, but in a text about /usr/bin/env it is no secret of the machine.
    telling = [(path, instead) for path, instead in both.items() if path.count("/") > 1 or instead == "~"]
    return sorted((pair for pair in telling if len(pair[0]) > 2), key=lambda pair: -len(pair[0]))


class _Scrubber:
    """Takes out of a text what differs from run to run and from machine to machine."""

    def __init__(self, paths: Sequence[tuple[str, str]]) -> None:
        self._instead = dict(paths)
        alternatives = "|".join(re.escape(path) for path, _ in paths)
        self._paths = re.compile(rf"(?:{alternatives})(?![\w.-])")

    def __call__(self, text: str) -> str:
        text = _ADDRESS.sub("", text)
        return self._paths.sub(lambda found: self._instead[found[0]], text)


@dataclass(frozen=True, slots=True)
class _Loaded:
    module: types.ModuleType
    members: tuple[tuple[str, Any], ...]
    below: tuple[str, ...]
    problems: tuple[Skipped, ...]


_T = TypeVar("_T")


class _Documentation:
    """Pages for modules and for their public classes and functions."""

    def __init__(self, limits: CrawlLimits, nowhere: TextIO) -> None:
        self._limits = limits
        self._nowhere = nowhere
        self._scrub = _Scrubber(_own_paths())
        self._html = _Html(self._scrub)
        self._names: dict[str, tuple[dict[str, str], dict[str, str]]] = {}
        self._cwd = os.getcwd()

    def tree(self, name: str) -> Iterator[Found]:
        """The module, its members, and what is below it."""
        loaded = self._guarded(name, lambda: self._load(name))
        if isinstance(loaded, Skipped):
            yield loaded
            return
        yield from loaded.problems
        yield self._page(name, lambda: self._module(name, loaded))
        for member, value in loaded.members:
            yield self._page(f"{name}.{member}", partial(self._member, value))
        for child in loaded.below:
            if child in _NOT_IMPORTED_PARTS:
                yield Skipped(f"{name}.{child}", _NOT_IMPORTED_WHY)
            else:
                yield from self.tree(f"{name}.{child}")

    def _guarded(self, name: str, work: Callable[[], _T]) -> _T | Skipped:
        """The work done in its time, or why it was not.

        Nothing that the documented code does is a reason to stop: it may print, hang or raise SystemExit.
        """
        try:
            self._start_timer()
            try:
                with redirect_stdout(self._nowhere), redirect_stderr(self._nowhere), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return work()
            except _TooSlow:
                raise
            except BaseException as error:
                # Still on the clock: the text of an exception is the module's doing too.
                return Skipped(name, self._scrub(_reason(error)))
            finally:
                self._stop_timer()
        except _TooSlow:
            # It may have come between the end of the work and the stop.
            self._stop_timer()
            return Skipped(name, f"took longer than {self._limits.module_seconds:g} s")
        finally:
            os.chdir(self._cwd)

    def _start_timer(self) -> None:
        seconds = self._limits.module_seconds
        # Every time anew: a module may have put its own handler in place.
        signal.signal(signal.SIGALRM, _too_slow)
        # And again from then on, for a module that catches it.
        signal.setitimer(signal.ITIMER_REAL, seconds, min(seconds, 1.0))
        # What goes on catching it, or never comes back from C, ends the process: the reader sees a crawl
        # that died, and the traceback on the standard error says where.
        faulthandler.dump_traceback_later(seconds * self._limits.patience, exit=True, file=_STDERR)

    def _stop_timer(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()

    def _load(self, name: str) -> _Loaded:
        module = importlib.import_module(name)
        members, problems = _members(module)
        return _Loaded(module, members, _below(module), problems)

    def _page(self, name: str, make: Callable[[], str]) -> Found:
        made = self._guarded(name, make)
        if isinstance(made, Skipped):
            return made
        url = canonical_url(DOCS_URL + quote(name))
        if url is None:
            return Skipped(name, "its URL would be too long")
        return Page(url, 200, "text/html", "utf-8", made.encode("utf-8", "replace"))

    def _document(self, title: str, extras: str, content: str) -> str:
        heading = self._html.heading(f'<strong class="title">{title}</strong>', extras)
        plain_title = re.sub(r"<[^>]*>", "", title)
        return self._scrub(
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{plain_title}</title></head>'
            f"<body>{heading}{content}</body></html>\n"
        )

    def _module(self, name: str, loaded: _Loaded) -> str:
        page = self._html
        functions, classes = self._targets(name, loaded.members)
        content = [self._prose(loaded.module, functions, classes)]
        if loaded.below:
            below = [_link(f"{name}.{child}", child) for child in loaded.below]
            content.append(page.bigsection("Package Contents", "pkg-content", "<br>\n".join(below)))
        for heading, kind, wanted in (("Classes", "index", inspect.isclass), ("Functions", "functions", _is_function)):
            listed = [self._listed(name, member, value) for member, value in loaded.members if wanted(value)]
            if listed:
                content.append(page.bigsection(heading, kind, "\n".join(listed)))
        data = [page.docother(value, member) for member, value in _data(loaded.module)]
        if data:
            content.append(page.bigsection("Data", "data", "<br>\n".join(data)))
        *parents, last = name.split(".")
        trail = [_link(".".join(parents[: depth + 1]), part) for depth, part in enumerate(parents)]
        return self._document(".".join([*trail, last]), "module", "".join(content))

    def _prose(self, thing: Any, functions: dict[str, str], classes: dict[str, str]) -> str:
        page = self._html
        return f"<p>{page.markup(pydoc.getdoc(thing), page.preformat, functions, classes)}</p>\n"

    def _listed(self, name: str, member: str, value: Any) -> str:
        synopsis = pydoc.getdoc(value).partition("\n")[0]
        return f"<dt>{_link(f'{name}.{member}', member)}</dt><dd>{self._html.escape(synopsis)}</dd>"

    def _member(self, value: Any) -> str:
        """The page of a class or function. It depends on the object alone, not on the name it was found by:
        what several modules export is the same page at several places."""
        home = _text_of(getattr(value, "__module__", None))
        name = f"{home}.{value.__qualname__}" if home else value.__qualname__
        functions, classes = self._targets_of(home)
        write = self._html.docclass if inspect.isclass(value) else self._html.docroutine
        content = write(value, value.__name__, home, functions, classes)
        return self._document(self._html.escape(name), _link(home, home) if home else "", content)

    def _targets_of(self, home: str) -> tuple[dict[str, str], dict[str, str]]:
        if home not in self._names:
            module = sys.modules.get(home)
            members = () if module is None else _members(module)[0]
            self._names[home] = self._targets(home, members)
        return self._names[home]

    def _targets(self, name: str, members: Iterable[tuple[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
        """Where the names of functions and of classes lead that a text of this module mentions."""
        functions: dict[str, str] = {}
        classes: dict[str, str] = {}
        for member, value in members:
            (classes if inspect.isclass(value) else functions)[member] = f"{name}.{member}"
        return functions, classes


def _reason(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        # An exception that cannot even be printed.
        return type(error).__name__


def _is_function(value: object) -> bool:
    return not inspect.isclass(value)


def _below(module: types.ModuleType) -> tuple[str, ...]:
    """The names of the modules in a package."""
    path = vars(module).get("__path__")
    return () if path is None else tuple(sorted({found.name for found in pkgutil.iter_modules(path)}))


def _members(module: types.ModuleType) -> tuple[tuple[tuple[str, Any], ...], tuple[Skipped, ...]]:
    """The public classes and functions of a module, by pydoc's rules: what `__all__` names, or else what was
    made in the module itself."""
    exported = vars(module).get("__all__")
    names = {str(name) for name in (vars(module) if exported is None else exported)}
    members, problems = [], []
    # A module below goes by its own name, also where a function has the same (unittest.main).
    for name in sorted(names.difference(_below(module))):
        if not name.isidentifier() or not pydoc.visiblename(name, exported, module):
            continue
        try:
            value = getattr(module, name)
        except Exception as error:
            problems.append(Skipped(f"{module.__name__}.{name}", _reason(error)))
            continue
        if not inspect.isclass(value) and not inspect.isroutine(value):
            continue
        own = inspect.isbuiltin(value) or getattr(value, "__module__", None) == module.__name__
        if exported is not None or own:
            members.append((name, value))
    return tuple(members), tuple(problems)


def _data(module: types.ModuleType) -> list[tuple[str, Any]]:
    exported = vars(module).get("__all__")
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if not name.startswith("__") and pydoc.isdata(value) and pydoc.visiblename(name, exported, module)
    )


def documentation(names: Iterable[str], nowhere: TextIO, limits: CrawlLimits = DEFAULT_LIMITS) -> Iterator[Found]:
    """Pages for the modules of these names and for all below them. It imports them: not for a process that
    has anything else to do. What they print goes to `nowhere`."""
    pages = _Documentation(limits, nowhere)
    with _docstrings_only():
        for name in names:
            if name in _NOT_IMPORTED:
                yield Skipped(name, _NOT_IMPORTED_WHY)
            else:
                yield from pages.tree(name)


def standard_library() -> list[str]:
    """The modules at the top of the running Python's library."""
    return sorted(sys.stdlib_module_names)


# --------------------------------------------------------------------------------------------- saved pages


def html_files(folder: Path) -> list[Path]:
    """The HTML files below a folder, in the order of their paths."""
    found: list[Path] = []
    for here, folders, files in os.walk(folder):
        folders.sort()
        found.extend(Path(here, name) for name in files if name.lower().endswith((".html", ".htm")))
    return sorted(found)


def saved_pages(folder: Path, limits: CrawlLimits = DEFAULT_LIMITS) -> Iterator[Found]:
    """A page for every HTML file below the folder, under the address its path would have on a server."""
    for path in html_files(folder):
        relative = quote(path.relative_to(folder).as_posix().encode("utf-8", "surrogateescape"))
        url = canonical_url(HTML_URL + relative)
        if url is None:
            yield Skipped(relative, "its URL would be too long")
            continue
        try:
            body = _read_file(path, limits.body_bytes_max + 1)
        except OSError as error:
            yield Skipped(relative, error.strerror or str(error))
            continue
        yield from _bounded(Page(url, 200, "text/html", None, body), limits)


def _read_file(path: Path, bytes_max: int) -> bytes:
    # A pipe that has the name of a page would wait for a writer for ever.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a regular file")
    with open(path, "rb") as file:
        return file.read(bytes_max)


def _bounded(page: Page, limits: CrawlLimits) -> Iterator[Found]:
    """The page, and a note when its body had to be cut."""
    if len(page.body) > limits.body_bytes_max:
        page = replace(page, body=page.body[: limits.body_bytes_max])
        yield page
        yield Noted(page.url, f"the body is longer than {limits.body_bytes_max} bytes; the rest was left out")
    else:
        yield page


# --------------------------------------------------------------------------------------------- web archives


class _Damaged(Exception):
    """The archive ends or breaks where it should go on."""


class _ArchiveFile:
    """The bytes of an archive, unpacked, and an end that comes too early made known.

    warcio takes the end of a truncated gzip file for the end of the archive, and compares no checksum.
    """

    def __init__(self, file: BinaryIO, chunk_bytes: int) -> None:
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self._member: Any = None
        self._unread = b""
        self._offset = 0
        #: What lies before this offset is what was written, as far as the file can tell.
        self.checked = 0

    def read(self, size: int) -> bytes:
        if self._packed:
            data = self._unpacked(size)
            self._offset += len(data)
        else:
            data = self._file.read(size)
            self._offset = self.checked = self._offset + len(data)
        return data

    def tell(self) -> int:
        return self._offset

    def _unpacked(self, size: int) -> bytes:
        while True:
            packed = self._unread or self._file.read(self._chunk_bytes)
            if self._member is None:
                # Tapes and disks fill up a last block with zeros.
                self._unread = packed.lstrip(b"\0")
                if not self._unread:
                    if packed:
                        continue
                    return b""
                packed, self._member = self._unread, zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            try:
                data: bytes = self._member.decompress(packed, size)
            except zlib.error as error:
                raise _Damaged(f"the gzip file is damaged: {error}") from error
            if self._member.eof:
                # Its checksum was right.
                self.checked = self._offset + len(data)
                self._unread, self._member = self._member.unused_data, None
            else:
                self._unread = self._member.unconsumed_tail
                if not data and not packed:
                    raise _Damaged("the gzip file is cut")
            if data:
                return data


def archived_pages(path: Path, limits: CrawlLimits = DEFAULT_LIMITS) -> Iterator[Found]:
    """The responses and resources in a WARC file, in its order; of a damaged file the whole records before
    the damage."""
    # Held back until the next record is read: only then is it known whether its own checksum was right.
    held: list[Found] = []
    ends = 0
    why = None
    try:
        with open(path, "rb") as file:
            archive = _ArchiveFile(file, limits.chunk_bytes)
            records = ArchiveIterator(archive, no_record_parse=True)
            for record in records:
                yield from held
                held = []
                held = list(_archived(record, limits))
                ends = archive.tell() - records.reader.rem_length()
    except _Damaged as error:
        held = held if ends <= archive.checked else []
        why = str(error)
    except (ArchiveLoadFailed, OSError) as error:
        why = " ".join(str(error).split())
    yield from held
    if why is not None:
        yield Skipped(path.name, f"the rest of the archive: {why}")


def _archived(record: Any, limits: CrawlLimits) -> Iterator[Found]:
    stream = record.raw_stream
    if not hasattr(stream, "limit"):
        raise _Damaged("a record does not say how long it is")
    found = _page_of_record(record, limits)
    while stream.read(limits.chunk_bytes):
        pass
    if stream.limit > 0:
        raise _Damaged("the file ends inside a record")
    if isinstance(found, Page):
        yield from _bounded(found, limits)
    elif found is not None:
        yield found


def _page_of_record(record: Any, limits: CrawlLimits) -> Page | Skipped | None:
    """None for a record that is about something else than a page."""
    if record.rec_type not in ("response", "resource", "revisit"):
        return None
    named = record.rec_headers.get_header("WARC-Target-URI") or ""
    url = canonical_url(named)
    if url is None:
        return Skipped(named[:_SHOWN_VALUE_CHARS], "not a URL that can be indexed")
    if record.rec_type == "revisit":
        return Skipped(url, "a revisit record holds no page")
    if record.rec_type == "resource":
        content_type = record.rec_headers.get_header("Content-Type")
        return Page(url, 200, content_type, None, _read_body(_pieces(record.raw_stream, limits), limits))
    try:
        return _response(url, record.raw_stream, limits)
    except (http.client.HTTPException, ValueError) as error:
        return Skipped(url, f"not a response that can be read: {error}")


def _response(url: str, stream: Any, limits: CrawlLimits) -> Page:
    status_line = stream.readline(limits.chunk_bytes)
    if (found := re.match(rb"HTTP/[0-9.]+ +([0-9]{3})\b", status_line)) is None:
        raise ValueError(f"it begins with {status_line[:40]!r}")
    headers = http.client.parse_headers(stream)
    pieces = _pieces(stream, limits)
    if "chunked" in headers.get("Transfer-Encoding", "").lower():
        pieces = _unchunked(stream, limits)
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        pieces = _inflated(pieces, encoding, limits)
    return Page(
        url,
        int(found[1]),
        headers.get("Content-Type"),
        headers.get_content_charset(),
        _read_body(pieces, limits),
        _as_sent(headers.get("Location")),
    )


def _as_sent(value: str | None) -> str | None:
    """Headers are read as Latin-1, but an address that is not ASCII is hardly ever that."""
    if value is None or value.isascii():
        return value
    return value.encode("latin-1").decode("utf-8", "replace")


def _read_body(pieces: Iterable[bytes], limits: CrawlLimits) -> bytes:
    """The body, or as much of it as shows that it is too long."""
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > limits.body_bytes_max:
            break
    return bytes(body[: limits.body_bytes_max + 1])


def _pieces(stream: Any, limits: CrawlLimits) -> Iterator[bytes]:
    while piece := stream.read(limits.chunk_bytes):
        yield bytes(piece)


def _unchunked(stream: Any, limits: CrawlLimits) -> Iterator[bytes]:
    """The body of a response sent in chunks. warcio would hold a whole chunk, of whatever size."""
    line = stream.readline(limits.chunk_bytes)
    if _chunk_size(line) is None:
        # Some archivers join the chunks and leave the header as it was.
        yield line
        yield from _pieces(stream, limits)
        return
    while (left := _chunk_size(line)) is not None and left > 0:
        while left > 0 and (piece := stream.read(min(left, limits.chunk_bytes))):
            yield piece
            left -= len(piece)
        stream.readline(limits.chunk_bytes)
        line = stream.readline(limits.chunk_bytes)


def _chunk_size(line: bytes) -> int | None:
    found = re.match(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n", line)
    return None if found is None else int(found[1], 16)


_TELLING_BYTES = 16


def _inflated(pieces: Iterator[bytes], encoding: str, limits: CrawlLimits) -> Iterator[bytes]:
    """The pieces unpacked, none of them large however well they were packed."""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"content encoding {encoding!r} is not supported")
    first = b""
    while len(first) < _TELLING_BYTES and (piece := next(pieces, b"")):
        first += piece
    packed = _decompressor(first)
    if packed is None:
        # Some archivers unpack the body and leave the header as it was.
        yield first
        yield from pieces
        return
    for piece in chain([first], pieces):
        while piece and not packed.eof:
            try:
                yield packed.decompress(piece, limits.chunk_bytes)
            except zlib.error as error:
                raise ValueError(f"content encoding {encoding} is damaged: {error}") from error
            piece = packed.unconsumed_tail


def _decompressor(first: bytes) -> Any:
    """For gzip, zlib or bare deflate, whichever the first piece turns out to be; None if it is none of them."""
    if first.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(zlib.MAX_WBITS | 16)
    for window in (zlib.MAX_WBITS, -zlib.MAX_WBITS):
        try:
            zlib.decompressobj(window).decompress(first, 64)
        except zlib.error:
            continue  # the next form may fit
        return zlib.decompressobj(window)
    return None


# --------------------------------------------------------------------------------------------- the process

_QUIET = "PERCO_CRAWL_QUIET"
# Documentation shows defaults, and a default may be what some variable says: secrets must not get that far.
_KEPT_VARIABLES = frozenset(
    {"PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV"}
    | {"PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
)
_SET_VARIABLES = {
    _QUIET: "1",
    # The order of sets is part of what documentation shows.
    "PYTHONHASHSEED": "0",
    "PYTHONWARNINGS": "ignore",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    # Or setuptools puts its own distutils in the place of the library's.
    "SETUPTOOLS_USE_DISTUTILS": "stdlib",
}


def _restart_quietly() -> NoReturn:
    """The same command again, with an environment that is the same for everybody and without a display."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], kept | _SET_VARIABLES)


def _forget_environment() -> None:
    """What was kept has done its work when Python has started; the home folder can be told in a text."""
    home = os.path.expanduser("~")
    os.environ.clear()
    os.environ.update(_SET_VARIABLES | {"HOME": home, "PATH": os.defpath})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perco.webindex.crawl",
        description="Writes pages to a pipe for an index to read. Without a source it crawls the documentation "
        "of this Python's standard library: a page per module, public class and public function.",
        epilog="The stream is msgpack; perco.webindex.crawl.read_crawl reads it.",
    )
    parser.add_argument(
        "--mine",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="crawl the documentation of an installed package instead (it will be imported); may be repeated",
    )
    parser.add_argument("--stdlib", action="store_true", help="crawl the standard library as well as the sources named")
    parser.add_argument("--html", metavar="DIR", type=Path, help="crawl the .html and .htm files in a folder and below")
    parser.add_argument(
        "--warc",
        metavar="FILE",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        help="crawl web archives (.warc, .warc.gz): their responses and resources",
    )
    parser.add_argument(
        "--synthetic", metavar="N", type=_natural, help="make up N pages, linked and copied as pages of the web are"
    )
    parser.add_argument("--seed", metavar="N", type=_natural, default=0, help="of the pages that are made up")
    parser.add_argument("--limit", metavar="N", type=_natural, help="stop after N pages")
    parser.add_argument("--out", metavar="FILE", default="-", help="write here instead of to the standard output (-)")
    parser.add_argument(
        "--body-max",
        metavar="BYTES",
        type=_natural,
        default=DEFAULT_LIMITS.body_bytes_max,
        help="leave out what a page has beyond this many bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--module-seconds",
        metavar="S",
        type=_seconds,
        default=DEFAULT_LIMITS.module_seconds,
        help="give up on a module that takes longer than this to import (default: %(default)g)",
    )
    return parser


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.001 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0.001 and 86400")
    return seconds


def _problem(args: argparse.Namespace) -> str | None:
    """What is wrong with the sources, said before anything is written."""
    for package in args.mine:
        top = package.partition(".")[0]
        if not top.isidentifier() or (top not in _NOT_IMPORTED and importlib.util.find_spec(top) is None):
            return f"--mine expects the name of an installed package; there is none named {package!r}"
    for archive in args.warc:
        if not archive.is_file():
            return f"--warc expects web archives (.warc or .warc.gz); {archive} is not a file"
    if args.html is not None:
        if not args.html.is_dir():
            return f"--html expects a folder of saved web pages; {args.html} is not a folder"
        if not html_files(args.html):
            return f"--html expects a folder of saved web pages; there is no .html or .htm file below {args.html}"
    return None


def _sources(args: argparse.Namespace, nowhere: TextIO) -> Iterator[Found]:
    limits = CrawlLimits(body_bytes_max=args.body_max, module_seconds=args.module_seconds)
    others = args.mine or args.warc or args.html is not None or args.synthetic is not None
    modules = list(args.mine)
    if args.stdlib or not others:
        modules += standard_library()
    yield from documentation(modules, nowhere, limits)
    if args.html is not None:
        yield from saved_pages(args.html, limits)
    for archive in args.warc:
        yield from archived_pages(archive, limits)
    if args.synthetic is not None:
        yield from SyntheticWeb(args.synthetic, args.seed)


def problem_with(arguments: Sequence[str]) -> str | None:
    """What is wrong with the sources of a crawl, before it is begun."""
    return _problem(_parser().parse_args(arguments))


def _search_path_without_here() -> None:
    """`python -m` looks for modules in the current folder first, where a random.py would hide the library's.
    A package of the user's may well be there, so it comes last."""
    here = os.getcwd()
    others = [entry for entry in sys.path if entry not in ("", here)]
    sys.path[:] = others if len(others) == len(sys.path) else [*others, here]


def _take_output(name: str) -> BinaryIO:
    """Opens the output, and takes the standard streams away from the modules that will be imported."""
    number = os.dup(1) if name == "-" else os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return os.fdopen(number, "wb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the crawl of this command line; for a process that does nothing else."""
    _search_path_without_here()
    parser = _parser()
    args = parser.parse_args(arguments)
    if (problem := _problem(args)) is not None:
        print(problem, file=sys.stderr)
        return 2
    if args.out == "-" and sys.stdout.isatty():
        print("the stream is not for a terminal: send it through a pipe, or name a file with --out", file=sys.stderr)
        return 2
    args.warc = [archive.resolve() for archive in args.warc]
    args.html = None if args.html is None else args.html.resolve()
    try:
        out = _take_output(args.out)
    except OSError as error:
        parser.error(f"--out: {error}")
    # A module may raise KeyboardInterrupt and is skipped for it; the user's own stops the crawl.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _crawl(args, out)
    except BrokenPipeError:
        return 1
    except OSError as error:
        print(f"{parser.prog}: the crawl could not be written: {error}", file=sys.stderr)
        return 1
    return 0


def _crawl(args: argparse.Namespace, out: BinaryIO) -> None:
    """Runs in an empty folder of its own, because some modules leave files where they are imported."""
    _forget_environment()
    here = os.getcwd()
    with out, tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        os.chdir(folder)
        try:
            write_crawl(_sources(args, nowhere), out, args.limit)
        finally:
            os.chdir(here)


if __name__ == "__main__":
    if _QUIET not in os.environ:
        _restart_quietly()
    status = main()
    sys.stderr.flush()
    # Without waiting for threads and exit handlers of what was imported.
    os._exit(status)
