"""The crawler: its stream of any pages is whole, bounded and the same in every run."""

import gzip
import io
import os
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, strategies as st
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from perco.webindex.archives import archived_pages
from perco.webindex.crawl import saved_pages
from perco.webindex.crawled import (
    DOCS_URL,
    HTML_URL,
    CrawlDecoder,
    CrawlError,
    CrawlLimits,
    Done,
    Found,
    Noted,
    ReadLimits,
    Record,
    Skipped,
    encode,
    read_crawl,
    write_crawl,
)
from perco.webindex.pages import Page, parse

SITE = "https://site.example/"


def page(name: str, body: bytes = b"") -> Page:
    return Page(SITE + name, 200, "text/html", None, body)


# ------------------------------------------------------------------------------------------- the stream

RECORDS: list[Found] = [page("a", b"x" * 100), Skipped("b", "why"), page("c"), Noted("c", "cut")]


def stream(records: Iterable[Found], limit: int | None = None) -> bytes:
    out = io.BytesIO()
    write_crawl(records, out, limit)
    return out.getvalue()


def read(data: bytes, limits: ReadLimits | None = None) -> list[Record]:
    return list(read_crawl(io.BytesIO(data), limits or ReadLimits()))


def test_records_come_out_as_they_went_in_and_end_with_the_number_of_pages() -> None:
    assert read(stream(RECORDS)) == [*RECORDS, Done(2)]


def test_after_the_limit_there_are_no_more_pages() -> None:
    assert read(stream(RECORDS, limit=1)) == [*RECORDS[:2], Done(1)]
    assert read(stream(RECORDS, limit=0)) == [Done(0)]


@given(st.lists(st.integers(0, 300), max_size=8))
def test_it_does_not_matter_in_what_pieces_the_bytes_come(cuts: list[int]) -> None:
    data = stream(RECORDS)
    places = [0, *sorted(cuts), len(data)]
    decoder = CrawlDecoder(ReadLimits(chunk_bytes=7))
    found = [record for start, end in pairwise(places) for record in decoder.feed(data[start:end])]
    decoder.finish()
    assert found[: len(RECORDS)] == RECORDS
    assert isinstance(found[-1], Done)


@given(st.integers(0, len(stream(RECORDS)) - 1))
def test_a_crawl_that_ends_anywhere_before_its_end_is_an_error(length: int) -> None:
    with pytest.raises(CrawlError, match="half-way"):
        read(stream(RECORDS)[:length])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encode(Done(1)), "counted 1 pages, but 0 came"),
        (encode(Done(0)) + encode(page("a")), "sent more after"),
        (b"\xc1", "not msgpack"),
        (bytes(msgpack.packb([1])), "unknown kind"),
        (bytes(msgpack.packb({"done": "1"})), "unknown kind"),
        (bytes(msgpack.packb({"skipped": "a", "why": "b", "more": "c"})), "unknown kind"),
        (bytes(msgpack.packb({"url": "a"})), "unknown kind"),
    ],
)
def test_a_stream_of_something_else_is_an_error(data: bytes, why: str) -> None:
    with pytest.raises(CrawlError, match=why):
        read(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_crawl_or_an_error(data: bytes) -> None:
    with pytest.raises(CrawlError):
        read(data)


def test_a_record_over_the_limit_is_an_error_and_is_not_held() -> None:
    limits = ReadLimits(record_bytes_max=10_000, chunk_bytes=1_000)
    assert len(read(stream([page("a", bytes(9_000))]), limits)) == 2
    endless = stream([page("a", bytes(30_000_000))])
    tracemalloc.start()
    try:
        with pytest.raises(CrawlError, match="more than 10000 bytes"):
            read(endless, limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30_000_000 + 20 * limits.record_bytes_max  # the BytesIO makes a copy of its own


# ------------------------------------------------------------------------------------------- saved pages


def test_every_html_file_is_a_page_under_the_address_of_its_path(tmp_path: Path) -> None:
    (tmp_path / "b c").mkdir()
    (tmp_path / "b c" / "é#.HTM").write_bytes(b"two")
    (tmp_path / "a.html").write_bytes(b"one")
    (tmp_path / "a.txt").write_bytes(b"no page")
    assert list(saved_pages(tmp_path)) == [
        Page(HTML_URL + "a.html", 200, "text/html", None, b"one"),
        Page(HTML_URL + "b%20c/%C3%A9%23.HTM", 200, "text/html", None, b"two"),
    ]


def test_relative_links_between_saved_pages_lead_from_one_to_the_other(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "a.html").write_text("<a href='../b c.html'>b</a>")
    (tmp_path / "b c.html").write_text("b")
    target, source = saved_pages(tmp_path)
    assert isinstance(source, Page)
    assert isinstance(target, Page)
    assert parse(source).links == ((target.url, "b"),)


def test_a_file_that_cannot_be_read_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.html")
    long = tmp_path / ("d" * 200) / ("e" * 200)
    long.mkdir(parents=True)
    (long / "page.html").write_text("x")
    why = {record.name[:9]: record.why for record in saved_pages(tmp_path) if isinstance(record, Skipped)}
    assert why == {
        "d" * 9: "its URL would be too long",
        "link.html": "No such file or directory",
        "pipe.html": "not a regular file",
    }


def test_of_a_file_of_a_hundred_megabytes_only_the_beginning_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(b"<p>word")
    os.truncate(tmp_path / "a.html", 100_000_000)
    tracemalloc.start()
    try:
        found, note = saved_pages(tmp_path, CrawlLimits(body_bytes_max=1_000_000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found, Page)
    assert len(found.body) == 1_000_000
    assert note == Noted(found.url, "the body is longer than 1000000 bytes; the rest was left out")
    assert peak < 5_000_000


# ------------------------------------------------------------------------------------------- web archives


class Writer(WARCWriter):  # type: ignore[misc]
    """warcio's own leaves its temporary files to the garbage collector, which warns of it."""

    def _create_temp_file(self) -> io.BytesIO:
        return io.BytesIO()


class Archive:
    """A WARC file in the making."""

    def __init__(self, path: Path, packed: bool = True) -> None:
        self.path = path
        self._out = io.BytesIO()
        self._packed = packed
        self._writer = Writer(self._out, gzip=packed)

    def response(self, url: str, body: bytes = b"", status: str = "200 OK", **headers: str) -> "Archive":
        named = [(name.replace("_", "-"), value) for name, value in headers.items()]
        http_headers = StatusAndHeaders(status, named, protocol="HTTP/1.1")
        return self._write(url, "response", body, http_headers)

    def record(self, url: str, kind: str, body: bytes, content_type: str = "") -> "Archive":
        return self._write(url, kind, body, None, content_type)

    def _write(
        self, url: str, kind: str, body: bytes, http_headers: StatusAndHeaders | None, content_type: str = ""
    ) -> "Archive":
        record = self._writer.create_warc_record(
            url, kind, payload=io.BytesIO(body), http_headers=http_headers, warc_content_type=content_type
        )
        self._writer.write_record(record)
        return self

    def raw(self, url: str, block: bytes) -> "Archive":
        """A response of these bytes, be they what they may."""
        head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\nContent-Length: {len(block)}\r\n\r\n"
        record = head.encode() + block + b"\r\n\r\n"
        self._out.write(gzip.compress(record, mtime=0) if self._packed else record)
        return self

    def bytes(self) -> bytes:
        return self._out.getvalue()

    def pages(self, cut: int | None = None, limits: CrawlLimits | None = None) -> list[Found]:
        self.path.write_bytes(self.bytes()[:cut])
        return list(archived_pages(self.path, limits or CrawlLimits()))


@pytest.fixture(params=["packed", "plain"])
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Archive:
    return Archive(tmp_path / "a.warc", packed=request.param == "packed")


def test_responses_and_resources_are_pages_and_other_records_are_not(archive: Archive) -> None:
    archive.record("", "warcinfo", b"software: x\r\n", "application/warc-fields")
    archive.response(SITE + "a#x", b"one", Content_Type="text/html; charset=ISO-8859-2")
    archive.record(SITE + "a", "metadata", b"x: y\r\n", "application/warc-fields")
    archive.record(SITE + "b", "resource", b"two", "text/plain")
    archive.raw(SITE + "c", "HTTP/1.1 301 Moved\r\nLocation: /ü\r\n\r\n".encode())
    assert archive.pages() == [
        Page(SITE + "a", 200, "text/html; charset=ISO-8859-2", "iso-8859-2", b"one"),
        Page(SITE + "b", 200, "text/plain", None, b"two"),
        Page(SITE + "c", 301, None, None, b"", "/ü"),
    ]


def test_one_url_twice_is_delivered_twice_in_order(archive: Archive) -> None:
    archive.response(SITE, b"old").response(SITE, b"new")
    assert [record.body for record in archive.pages() if isinstance(record, Page)] == [b"old", b"new"]


def test_what_is_no_page_is_skipped_and_the_rest_goes_on(archive: Archive) -> None:
    archive.record("dns:site.example", "response", b"x", "text/dns")
    archive.raw(SITE + "a", b"not http")
    archive.response(SITE + "b", b"x", Content_Encoding="br")
    archive.record(SITE + "c", "revisit", b"", "application/http")
    archive.response(SITE + "d", b"x" * 10, Content_Encoding="gzip")
    archive.response(SITE + "e", b"", **{f"Line{number}": "x" for number in range(1_000)})
    archive.response(SITE + "f", b"end")
    *skipped, raw, long, last = archive.pages()
    assert [record.why for record in skipped if isinstance(record, Skipped)] == [
        "not a URL that can be indexed",
        "not a response that can be read: it begins with b'not http'",
        "not a response that can be read: content encoding 'br' is not supported",
        "a revisit record holds no page",
    ]
    assert raw == Page(SITE + "d", 200, None, None, b"x" * 10)
    assert isinstance(long, Skipped)
    assert last == Page(SITE + "f", 200, None, None, b"end")


def chunked(*chunks: bytes) -> bytes:
    return b"".join(b"%x;ext=1\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b"")) + b"\r\n"


def bare_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (chunked(b"one ", b"two"), {"Transfer_Encoding": "chunked"}),
        (b"one two", {"Transfer_Encoding": "chunked"}),
        (gzip.compress(b"one two", mtime=0), {"Content_Encoding": "gzip"}),
        (zlib.compress(b"one two"), {"Content_Encoding": "deflate"}),
        (bare_deflate(b"one two"), {"Content_Encoding": "deflate"}),
        (b"one two", {"Content_Encoding": "gzip"}),
        (chunked(*(bytes([byte]) for byte in gzip.compress(b"one two", mtime=0))), {"Transfer_Encoding": "chunked"}),
    ],
)
def test_a_body_is_delivered_as_it_was_before_it_was_packed_to_be_sent(
    tmp_path: Path, body: bytes, headers: dict[str, str]
) -> None:
    if body.startswith(b"1;"):
        headers = {**headers, "Content_Encoding": "gzip"}
    (found,) = Archive(tmp_path / "a.warc").response(SITE, body, **headers).pages()
    assert found == Page(SITE, 200, None, None, b"one two")


def test_a_body_that_cannot_be_unpacked_to_its_end_is_skipped(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(bytes(range(256)) * 50))
    packed[40:60] = b"\xff" * 20
    skipped, last = (
        Archive(tmp_path / "a.warc").response(SITE, bytes(packed), Content_Encoding="gzip").response(SITE, b"x").pages()
    )
    assert isinstance(skipped, Skipped)
    assert "gzip is damaged" in skipped.why
    assert isinstance(last, Page)


def test_of_a_file_cut_anywhere_the_whole_records_are_delivered_and_the_reason_is_told(archive: Archive) -> None:
    archive.response(SITE + "a", bytes(range(256)))
    first = len(archive.bytes())
    archive.response(SITE + "b", bytes(range(256)))
    whole = len(archive.bytes())
    assert len(archive.pages()) == 2
    for cut in range(first + 40, whole - 4):
        *found, skipped = archive.pages(cut)
        assert [record.url for record in found if isinstance(record, Page)] in ([SITE + "a"], [SITE + "a", SITE + "b"])
        assert all(record.body == bytes(range(256)) for record in found if isinstance(record, Page))
        assert isinstance(skipped, Skipped)
        assert skipped.name in ("a.warc", SITE + "b")


def test_of_a_damaged_gzip_file_the_whole_records_before_the_damage_are_delivered(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "a.warc.gz")
    starts, pages = [], []
    for name, body in (("a", b"one"), ("b", b"two"), ("c", bytes(range(256)))):
        starts.append(len(archive.bytes()))
        archive.raw(SITE + name, b"HTTP/1.1 200 OK\r\n\r\n" + body)
        pages.append(Page(SITE + name, 200, None, None, body))
    whole = archive.bytes()
    for place in range(2, len(whole)):
        for bits in (0x01, 0x55, 0xFF):
            archive.path.write_bytes(whole[:place] + bytes([whole[place] ^ bits]) + whole[place + 1 :])
            found = list(archived_pages(archive.path))
            skipped = [each for each in found if isinstance(each, Skipped)]
            # The time and the system in the head of a member stand under no checksum, and mean nothing here.
            count = len(found) - len(skipped)
            assert found[:count] == pages[:count]
            assert count >= sum(start <= place for start in starts) - 1
            assert count == len(pages) or ("damaged" in skipped[0].why or "cut" in skipped[0].why)


def test_zeros_after_a_gzip_file_are_no_damage_and_something_else_costs_no_page(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "a.warc.gz").response(SITE + "a", b"one")
    page = Page(SITE + "a", 200, None, None, b"one")
    whole = archive.bytes()
    archive.path.write_bytes(whole + bytes(200_000))
    assert list(archived_pages(archive.path)) == [page]
    archive.path.write_bytes(whole + bytes(10) + whole)
    assert list(archived_pages(archive.path)) == [page, page]
    archive.path.write_bytes(whole + b"something else")
    found, skipped = archived_pages(archive.path)
    assert found == page
    assert isinstance(skipped, Skipped)
    assert "the gzip file is damaged" in skipped.why


@pytest.mark.parametrize("data", [b"Dear reader,\n\nhello\n", b"\x1f\x8b and then not gzip", bytes(1000)])
def test_what_is_no_archive_is_told(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.warc").write_bytes(data)
    (skipped,) = archived_pages(tmp_path / "a.warc")
    assert isinstance(skipped, Skipped)


def test_an_empty_archive_has_no_pages(tmp_path: Path) -> None:
    (tmp_path / "a.warc").write_bytes(b"")
    assert list(archived_pages(tmp_path / "a.warc")) == []


HUGE = 100_000_000


@pytest.mark.parametrize("sent", ["plain", "chunked", "gzip"])
def test_of_a_response_of_a_hundred_megabytes_only_the_beginning_is_held(tmp_path: Path, sent: str) -> None:
    path = tmp_path / "a.warc.gz"
    if sent == "gzip":
        Archive(path).response(SITE, gzip.compress(bytes(HUGE), 1), Content_Encoding="gzip").pages()
    else:
        head = b"HTTP/1.1 200 OK\r\n" + (b"Transfer-Encoding: chunked\r\n" if sent == "chunked" else b"") + b"\r\n"
        head += b"%x\r\n" % HUGE if sent == "chunked" else b""
        with gzip.open(path, "wb", 1) as out:
            out.write(b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: %s\r\n" % SITE.encode())
            out.write(b"Content-Length: %d\r\n\r\n%s" % (len(head) + HUGE, head))
            for _ in range(100):
                out.write(bytes(HUGE // 100))
            out.write(b"\r\n\r\n")
    tracemalloc.start()
    try:
        found, note = archived_pages(path, CrawlLimits(body_bytes_max=1_000_000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(found, Page)
    assert found.body == bytes(1_000_000)
    assert isinstance(note, Noted)
    assert peak < 5_000_000


# ------------------------------------------------------------------------------------------- the process


def run(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "perco.webindex.crawl", *arguments],
        capture_output=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=60,
        check=False,
    )


def crawl(*arguments: str, cwd: Path | None = None, **environment: str) -> dict[str, Record]:
    """What a crawl found, by name."""
    done = run(*arguments, cwd=cwd, **environment)
    assert (done.returncode, done.stderr) == (0, b"")
    found: dict[str, Record] = {}
    for record in read_crawl(io.BytesIO(done.stdout)):
        if isinstance(record, Page):
            found[record.url.removeprefix(DOCS_URL)] = record
        elif not isinstance(record, Done):
            found[record.name] = record
    return found


def text_of(record: Record) -> str:
    assert isinstance(record, Page)
    return parse(record).text


def targets_of(record: Record) -> set[str]:
    assert isinstance(record, Page)
    return {target.removeprefix(DOCS_URL) for target, _ in parse(record).links}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a package `zoo`, to be the current folder of a crawl."""
    folder = tmp_path / "zoo"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        '"""Animals. See Animal and feed()."""\nfrom zoo.animals import *\n__all__ = ["Animal", "feed"]'
    )
    (folder / "animals.py").write_text(
        '"""All of them."""\n'
        "import os, random, zoo\n"
        "class Animal(dict):\n    '''An animal <b>&amp;</b> its food().'''\n"
        "    def eat(self, what, how=object(), where=os.environ):\n        '''Eats.'''\n"
        "class _Hidden(Animal): pass\n"
        "def feed(animal, names=frozenset({'ab', 'cd', 'ef', 'gh', 'ij'})):\n    '''Feeds an Animal.'''\n"
        "SECRET = os.environ.get('ZOO_SECRET', 'none')\n"
        "PLACE = __file__\n"
        "ENVIRONMENT = os.environ\n"
        "LEGS = 4\n"
    )
    return tmp_path


def test_a_module_a_class_and_a_function_are_pages_that_link_to_each_other(package: Path) -> None:
    found = crawl("--mine", "zoo", cwd=package)
    assert set(found) == {"zoo", "zoo.Animal", "zoo.feed", "zoo.animals", "zoo.animals.Animal", "zoo.animals.feed"}
    assert targets_of(found["zoo"]) == {"zoo.Animal", "zoo.feed", "zoo.animals"}
    assert targets_of(found["zoo.animals"]) == {"zoo", "zoo.animals.Animal", "zoo.animals.feed"}
    assert {"zoo.animals", "builtins.dict", "builtins.object"} <= targets_of(found["zoo.Animal"])
    assert {"zoo.animals", "zoo.animals.Animal"} <= targets_of(found["zoo.feed"])
    assert "An animal <b>&amp;</b> its food()." in text_of(found["zoo.Animal"])
    assert "Feeds an Animal." in text_of(found["zoo.animals"])


def test_what_several_modules_export_is_the_same_page_at_each_place(package: Path) -> None:
    found = crawl("--mine", "zoo", cwd=package)
    for name in ("Animal", "feed"):
        one, other = found[f"zoo.{name}"], found[f"zoo.animals.{name}"]
        assert isinstance(one, Page)
        assert isinstance(other, Page)
        assert replace(one, url=other.url) == other
        assert parse(one).title == f"zoo.animals.{name}"


def test_two_runs_give_the_same_bytes_wherever_and_however_they_are_started(package: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    names = [word for name in ("zoo", "json", "asyncio.events", "difflib", "configparser") for word in ("--mine", name)]
    one = run(*names, cwd=package, PYTHONHASHSEED="1", ZOO_SECRET="swordfish")
    other = run(*names, cwd=elsewhere, PYTHONHASHSEED="2", PYTHONPATH=str(package), DISPLAY=":7", COLUMNS="40")
    assert one.stdout == other.stdout
    assert len(one.stdout) > 100_000


def test_nothing_of_this_machine_gets_into_a_page(package: Path) -> None:
    done = run("--mine", "zoo", "--mine", "site", "--mine", "os", cwd=package, ZOO_SECRET="swordfish")
    for secret in ("swordfish", str(package), sys.prefix, sys.base_prefix, os.environ["PATH"], " at 0x"):
        assert secret.encode() not in done.stdout
    assert b"<strong>LEGS</strong> = 4" in done.stdout


BAD_MODULES = {
    "hangs": "import time\ntime.sleep(3600)",
    "hangs_on": "import time\ntry:\n    time.sleep(3600)\nexcept BaseException:\n    time.sleep(3600)",
    "leaves": "import sys\nsys.exit('bye')",
    "interrupts": "raise KeyboardInterrupt",
    "fails": "raise BaseException('on\\npurpose')",
    "broken": "def",
    "prints": "import os, sys\nprint('noise')\nos.write(1, b'noise')\nsys.stderr.write('noise')\nprint(input.__name__)",
    "asks": "import sys\nassert sys.stdin.read() == ''\ninput()",
    "warns": "import warnings\nwarnings.simplefilter('error')\nwarnings.warn('noise')",
    "moves": "import os\nos.chdir('/')\nopen('/dev/null')",
    "lies": "__all__ = ['missing', 'real', 3, 'a b']\ndef real(): 'Real.'",
    "throws": "__all__ = ['x']\ndef __getattr__(name): raise RuntimeError(name)",
    "odd": "class M(type):\n    def __dir__(cls): raise ValueError('no')\nclass A(metaclass=M): pass",
    "fine": "def fine(): 'Fine.'",
}


def test_whatever_a_module_does_the_crawl_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "__main__.py").write_text("raise SystemExit('ran')")
    (folder / "tests" / "__init__.py").write_text("raise SystemExit('ran')")
    for name, source in BAD_MODULES.items():
        (folder / f"{name}.py").write_text(source)
    found = crawl("--mine", "bad", "--module-seconds", "1", cwd=tmp_path)
    why = {name.removeprefix("bad."): each.why for name, each in found.items() if isinstance(each, Skipped)}
    assert why.pop("odd.A")
    assert why.pop("broken").startswith("SyntaxError: ")
    assert why == {
        "hangs": "took longer than 1 s",
        "hangs_on": "took longer than 1 s",
        "leaves": "SystemExit: bye",
        "interrupts": "KeyboardInterrupt",
        "fails": "BaseException: on\npurpose",
        "asks": "EOFError: EOF when reading a line",
        "warns": "UserWarning: noise",
        "lies.missing": "AttributeError: module 'bad.lies' has no attribute 'missing'",
        "throws.x": "RuntimeError: x",
        "tests": "not imported: it holds tests or demos, or opens a window",
        "__main__": "not imported: it holds tests or demos, or opens a window",
    }
    pages = {name for name, each in found.items() if isinstance(each, Page)}
    assert pages >= {"bad", "bad.prints", "bad.moves", "bad.lies", "bad.lies.real", "bad.fine", "bad.fine.fine"}


def test_a_module_that_will_not_be_stopped_ends_the_crawl_and_the_reader_knows(tmp_path: Path) -> None:
    (tmp_path / "clinging.py").write_text(
        "import time\nwhile True:\n    try:\n        time.sleep(3600)\n    except BaseException:\n        pass"
    )
    done = run("--mine", "clinging", "--mine", "json", "--module-seconds", "0.1", cwd=tmp_path)
    assert done.returncode != 0
    assert b"clinging.py" in done.stderr
    with pytest.raises(CrawlError, match="half-way"):
        read(done.stdout)


def test_modules_that_open_windows_or_are_tests_are_not_imported() -> None:
    found = crawl("--mine", "antigravity", "--mine", "__main__", "--mine", "idlelib")
    assert [type(record) for record in found.values()] == [Skipped] * 3


def test_a_file_in_the_current_folder_does_not_hide_the_library(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("raise SystemExit('wrong one')")
    assert isinstance(crawl("--mine", "colorsys", cwd=tmp_path)["colorsys"], Page)


def test_without_a_source_the_standard_library_is_crawled() -> None:
    found = crawl("--limit", "40")
    pages = [record for record in found.values() if isinstance(record, Page)]
    assert len(pages) == 40
    assert all(record.url.startswith(DOCS_URL) for record in pages)
    assert "__future__" in found


def test_sources_are_crawled_one_after_the_other(tmp_path: Path, package: Path) -> None:
    (tmp_path / "a.html").write_text("saved")
    Archive(tmp_path / "a.warc").response(SITE, b"one").pages()
    Archive(tmp_path / "b.warc").response(SITE, b"two").pages()
    out = tmp_path / "out.bin"
    done = run("--html", ".", "--warc", "a.warc", "b.warc", "--mine", "zoo", "--out", str(out), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    with out.open("rb") as file:
        pages = [record for record in read_crawl(file) if isinstance(record, Page)]
    assert [record.url for record in pages[-3:]] == [HTML_URL + "a.html", SITE, SITE]
    assert pages[0].url == DOCS_URL + "zoo"


def test_a_truncated_archive_is_no_failure_of_the_crawl(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "a.warc.gz").response(SITE + "a", b"one").response(SITE + "b", b"two")
    archive.pages(cut=-20)
    first, skipped, done = crawl_records("--warc", "a.warc.gz", cwd=tmp_path)
    assert isinstance(first, Page)
    assert isinstance(skipped, Skipped)
    assert skipped.why == "the rest of the archive: the gzip file is cut short"
    assert done == Done(1)


def crawl_records(*arguments: str, cwd: Path) -> list[Record]:
    finished = run(*arguments, cwd=cwd)
    assert finished.returncode == 0
    return read(finished.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--html", "empty"], "--html expects a folder of saved web pages; there is no .html or .htm file below empty"),
        (["--html", "missing"], "missing is not a folder"),
        (["--warc", "missing.warc"], "missing.warc is not a file"),
        (["--mine", "no_such_package"], "there is none named 'no_such_package'"),
        (["--mine", "../x"], "there is none named '../x'"),
        (["--limit", "-1"], "'-1' is not a number of 0 or more"),
        (["--module-seconds", "nan"], "'nan' is not a number of seconds"),
        (["--out", "missing/out"], "No such file or directory"),
    ],
)
def test_what_is_wrong_with_a_command_is_said_before_anything_is_written(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert said in done.stderr.decode()


def test_the_help_names_every_source() -> None:
    text = run("--help").stdout.decode()
    for option in ("--mine PACKAGE", "--html DIR", "--warc FILE", "--limit N", "--out FILE"):
        assert option in text


def test_a_reader_that_goes_away_ends_the_crawl_without_a_word() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "perco.webindex.crawl", "--mine", "asyncio"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1
