"""The output of a crawler: pages, and notes of what it left out, as a stream of bytes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import msgpack

from perco.webindex.pages import Page, pack, page_of

# The domain .invalid is reserved, so no page on the web can have these URLs.
DOCS_URL = "https://docs.python.invalid/"


HTML_URL = "https://pages.invalid/"


@dataclass(frozen=True, slots=True)
class CrawlLimits:
    """The crawler's limits for one page and one module."""

    body_bytes_max: int = 4 * 1024 * 1024
    """A longer body is cut here, and a note says so."""
    module_seconds: float = 10.0
    """The time allowed for importing a module, and again for making each of its pages."""


DEFAULT_LIMITS = CrawlLimits()

PATIENCE = 3.0
"""A module that cannot be interrupted ends the crawl after this many times `CrawlLimits.module_seconds`."""

CHUNK_BYTES = 64 * 1024
"""How many bytes are read at a time from a file whose contents are not trusted."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that yielded no page."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Noted:
    """A page that was not delivered whole."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a complete crawl."""

    pages: int


Found = Page | Skipped | Noted


Record = Found | Done


class CrawlError(Exception):
    """The stream does not contain a complete crawl."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """The limits within which the reader of a crawl accepts the crawler's output."""

    record_bytes_max: int = 8 * 1024 * 1024
    chunk_bytes: int = CHUNK_BYTES


DEFAULT_READ_LIMITS = ReadLimits()


def encode(record: Record) -> bytes:
    """The record as it is written to the stream."""
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
        raise CrawlError(f"the crawler sent a record of an unknown kind: {error}") from error


class CrawlDecoder:
    """Turns the bytes of a crawl into records, as they arrive in pieces of any size.

    For a reader that does its own I/O: call `feed` with each piece that was read, and `finish` at the end of the
    stream. The decoder never holds more than one record and one piece.
    """

    def __init__(self, limits: ReadLimits = DEFAULT_READ_LIMITS) -> None:
        self._limits = limits
        self._pages = 0
        self._done: Done | None = None
        self._unpacker = msgpack.Unpacker(max_buffer_size=limits.record_bytes_max + limits.chunk_bytes)

    def feed(self, data: bytes | bytearray) -> Iterator[Record]:
        """Decode more bytes; yields the records that they complete."""
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
                raise CrawlError(f"the crawler sent data that is not msgpack: {error}") from error
            yield self._checked(_decode(fields))

    def _checked(self, record: Record) -> Record:
        if self._done is not None:
            raise CrawlError("the crawler sent more after it had said that it was done")
        if isinstance(record, Page):
            self._pages += 1
        elif isinstance(record, Done):
            if record.pages != self._pages:
                raise CrawlError(f"the crawler counted {record.pages} pages, but {self._pages} came through")
            self._done = record
        return record

    def finish(self) -> None:
        """Check, at the end of the stream, that the crawl is complete. Raises: CrawlError."""
        if self._done is None:
            raise CrawlError(f"the crawler stopped half-way, after {self._pages} pages")


def read_crawl(stream: BinaryIO, limits: ReadLimits = DEFAULT_READ_LIMITS) -> Iterator[Record]:
    """The records of a crawl, read from a file or pipe. Raises: CrawlError if the crawl is not complete."""
    decoder = CrawlDecoder(limits)
    while data := stream.read(limits.chunk_bytes):
        yield from decoder.feed(data)
    decoder.finish()


def write_crawl(records: Iterable[Found], out: BinaryIO, limit: int | None = None) -> int:
    """Write the records, then the end of the crawl; returns the number of pages. Stops after `limit` pages."""
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


def bounded(page: Page, limits: CrawlLimits) -> Iterator[Found]:
    """The page, and a note if its body had to be cut."""
    if len(page.body) > limits.body_bytes_max:
        page = replace(page, body=page.body[: limits.body_bytes_max])
        yield page
        yield Noted(page.url, f"the body is longer than {limits.body_bytes_max} bytes; the rest was left out")
    else:
        yield page
