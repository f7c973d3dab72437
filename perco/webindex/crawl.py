"""A crawler that runs as a process of its own and writes what it finds to a pipe.

    python -m perco.webindex.crawl [--mine PACKAGE] [--html DIR] [--warc FILE ...] [--limit N] [--out FILE]

It is a process because its default source is the documentation of the running Python: to make it, the crawler imports
every module of the standard library. A module may print, change, start or break something: all of that stays in this
process, and the index that reads the stream sees only bytes. Saved pages and web archives come through the same stream.

The stream is a sequence of msgpack maps: a page as `pages.pack` writes it, `{"skipped": name, "why":
reason}`, `{"noted": name, "why": reason}` for a page that was delivered in part, and at the very end `{"done":
pages}`. If a stream lacks that end, the crawl has died, and the reader of the stream reports this. The same source
gives the same bytes in every run: the stream has no addresses of objects, no paths of this machine, and no values of
its environment.
"""

import argparse
import importlib
import importlib.util
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn, TextIO, TypeVar
from urllib.parse import quote

from perco.webindex.archives import archived_pages
from perco.webindex.crawled import DEFAULT_LIMITS, HTML_URL, CrawlLimits, Found, Skipped, bounded, write_crawl
from perco.webindex.pages import Page, canonical_url
from perco.webindex.pydocs import NOT_IMPORTED, documentation, standard_library
from perco.webindex.synthetic import SyntheticWeb

_T = TypeVar("_T")


# --------------------------------------------------------------------------------------------- saved pages


def html_files(folder: Path) -> list[Path]:
    """The HTML files below a folder, in the order of their paths."""
    found: list[Path] = []
    for here, folders, files in os.walk(folder):
        folders.sort()
        found.extend(Path(here, name) for name in files if name.lower().endswith((".html", ".htm")))
    return sorted(found)


def saved_pages(folder: Path, limits: CrawlLimits = DEFAULT_LIMITS) -> Iterator[Found]:
    """A page for every HTML file below the folder, under the address that its path would have on a server."""
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
        yield from bounded(Page(url, 200, "text/html", None, body), limits)


def _read_file(path: Path, bytes_max: int) -> bytes:
    # Opening a named pipe would wait for a writer forever.
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a regular file")
    with open(path, "rb") as file:
        return file.read(bytes_max)


# --------------------------------------------------------------------------------------------- the process

_QUIET = "PERCO_CRAWL_QUIET"
# Documentation shows default values, and a default value may come from an environment variable. So no variable that may
# hold a secret is kept.
_KEPT_VARIABLES = frozenset(
    {"PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV"}
    | {"PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
)
_SET_VARIABLES = {
    _QUIET: "1",
    # Documentation shows sets; this seed fixes the order of their elements.
    "PYTHONHASHSEED": "0",
    "PYTHONWARNINGS": "ignore",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    # Otherwise setuptools replaces the library's distutils with its own.
    "SETUPTOOLS_USE_DISTUTILS": "stdlib",
}


def _restart_quietly() -> NoReturn:
    """Run the same command again, in an environment with only the variables that it needs, and without a display."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], kept | _SET_VARIABLES)


def _forget_environment() -> None:
    """Drop the variables that were kept for Python's start. HOME stays, so that its path can be recognised in texts."""
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
        "--synthetic", metavar="N", type=_natural, help="make N pages, with links and duplicates as on the web"
    )
    parser.add_argument("--seed", metavar="N", type=_natural, default=0, help="the seed of the synthetic pages")
    parser.add_argument("--limit", metavar="N", type=_natural, help="stop after N pages")
    parser.add_argument("--out", metavar="FILE", default="-", help="write here instead of to the standard output (-)")
    parser.add_argument(
        "--body-max",
        metavar="BYTES",
        type=_natural,
        default=DEFAULT_LIMITS.body_bytes_max,
        help="cut off longer pages after this many bytes (default: %(default)s)",
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
    """The error in the sources, to be printed before anything is written; None if there is no error."""
    for package in args.mine:
        top = package.partition(".")[0]
        if not top.isidentifier() or (top not in NOT_IMPORTED and importlib.util.find_spec(top) is None):
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
    """The error in the sources of a crawl that has not begun yet; None if there is no error."""
    return _problem(_parser().parse_args(arguments))


def _search_path_without_here() -> None:
    """Make Python search the current folder for modules last. `python -m` searches this folder first, so a random.py in
    it would hide the library's. The folder stays on the path, because a package of the user may be in it."""
    here = os.getcwd()
    others = [entry for entry in sys.path if entry not in ("", here)]
    sys.path[:] = others if len(others) == len(sys.path) else [*others, here]


def _take_output(name: str) -> BinaryIO:
    """Open the output, and take the standard streams away from the modules that will be imported."""
    number = os.dup(1) if name == "-" else os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
    return os.fdopen(number, "wb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the crawl that the command line asks for; call this in a process that does nothing else."""
    _search_path_without_here()
    parser = _parser()
    args = parser.parse_args(arguments)
    if (problem := _problem(args)) is not None:
        print(problem, file=sys.stderr)
        return 2
    if args.out == "-" and sys.stdout.isatty():
        print("the output is binary: send it through a pipe, or name a file with --out", file=sys.stderr)
        return 2
    args.warc = [archive.resolve() for archive in args.warc]
    args.html = None if args.html is None else args.html.resolve()
    try:
        out = _take_output(args.out)
    except OSError as error:
        parser.error(f"--out: {error}")
    # If a module raises KeyboardInterrupt, the module is skipped; but Ctrl-C must stop the crawl.
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
    """Crawl in a temporary folder, because some modules leave files in the current folder when they are imported."""
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
    status: int = main()
    sys.stderr.flush()
    # Do not wait for threads and exit handlers of imported modules.
    os._exit(status)
