"""Pages from WARC archives."""

import http.client
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from warcio.archiveiterator import ArchiveIterator
from warcio.exceptions import ArchiveLoadFailed

from perco.webindex.crawled import CHUNK_BYTES, DEFAULT_LIMITS, CrawlLimits, Found, Skipped, bounded
from perco.webindex.pages import Page, canonical_url
from perco.webindex.pydocs import SHOWN_CHARS


class _Damaged(Exception):
    """The archive ends, or is damaged, where it should continue."""


class _ArchiveFile:
    """The bytes of an archive, unpacked; raises `_Damaged` if a gzip file ends too early.

    warcio mistakes the end of a truncated gzip file for the end of the archive, and verifies no checksums.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self._member: Any = None
        self._unread = b""
        self._offset = 0
        #: The bytes before this offset are as they were written, as far as the file has checksums to verify this.
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
            packed = self._unread or self._file.read(CHUNK_BYTES)
            if self._member is None:
                # Tapes and disks pad the last block with zeros.
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
                # The checksum of this member was right.
                self.checked = self._offset + len(data)
                self._unread, self._member = self._member.unused_data, None
            else:
                self._unread = self._member.unconsumed_tail
                if not data and not packed:
                    raise _Damaged("the gzip file is cut short")
            if data:
                return data


def archived_pages(path: Path, limits: CrawlLimits = DEFAULT_LIMITS) -> Iterator[Found]:
    """The responses and resources in a WARC file, in the order of the file. If the file is damaged, these are the
    complete records before the damage."""
    # Pages are held back until the next record is read: only then is it known whether their own checksum was right.
    held: list[Found] = []
    ends = 0
    why = None
    try:
        with open(path, "rb") as file:
            archive = _ArchiveFile(file)
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
    while stream.read(CHUNK_BYTES):
        pass
    if stream.limit > 0:
        raise _Damaged("the file ends inside a record")
    if isinstance(found, Page):
        yield from bounded(found, limits)
    elif found is not None:
        yield found


def _page_of_record(record: Any, limits: CrawlLimits) -> Page | Skipped | None:
    """The page in a record, or the reason why it has none; None for a record of another type."""
    if record.rec_type not in ("response", "resource", "revisit"):
        return None
    named = record.rec_headers.get_header("WARC-Target-URI") or ""
    url = canonical_url(named)
    if url is None:
        return Skipped(named[:SHOWN_CHARS], "not a URL that can be indexed")
    if record.rec_type == "revisit":
        return Skipped(url, "a revisit record holds no page")
    if record.rec_type == "resource":
        content_type = record.rec_headers.get_header("Content-Type")
        return Page(url, 200, content_type, None, _read_body(_pieces(record.raw_stream), limits))
    try:
        return _response(url, record.raw_stream, limits)
    except (http.client.HTTPException, ValueError) as error:
        return Skipped(url, f"not a response that can be read: {error}")


def _response(url: str, stream: Any, limits: CrawlLimits) -> Page:
    status_line = stream.readline(CHUNK_BYTES)
    if (found := re.match(rb"HTTP/[0-9.]+ +([0-9]{3})\b", status_line)) is None:
        raise ValueError(f"it begins with {status_line[:40]!r}")
    headers = http.client.parse_headers(stream)
    pieces = _pieces(stream)
    if "chunked" in headers.get("Transfer-Encoding", "").lower():
        pieces = _unchunked(stream)
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        pieces = _inflated(pieces, encoding)
    return Page(
        url,
        int(found[1]),
        headers.get("Content-Type"),
        headers.get_content_charset(),
        _read_body(pieces, limits),
        _as_sent(headers.get("Location")),
    )


def _as_sent(value: str | None) -> str | None:
    """An address as it was sent. Python reads headers as Latin-1, but non-ASCII addresses are hardly ever Latin-1."""
    if value is None or value.isascii():
        return value
    return value.encode("latin-1").decode("utf-8", "replace")


def _read_body(pieces: Iterable[bytes], limits: CrawlLimits) -> bytes:
    """The body. If it is too long, only its beginning: one byte more than the limit, to show that it is too long."""
    body = bytearray()
    for piece in pieces:
        body += piece
        if len(body) > limits.body_bytes_max:
            break
    return bytes(body[: limits.body_bytes_max + 1])


def _pieces(stream: Any) -> Iterator[bytes]:
    while piece := stream.read(CHUNK_BYTES):
        yield bytes(piece)


def _unchunked(stream: Any) -> Iterator[bytes]:
    """The body of a response sent in chunks. warcio would hold a whole chunk in memory, however large it is."""
    line = stream.readline(CHUNK_BYTES)
    if _chunk_size(line) is None:
        # Some archivers join the chunks and leave the header as it was.
        yield line
        yield from _pieces(stream)
        return
    while (left := _chunk_size(line)) is not None and left > 0:
        while left > 0 and (piece := stream.read(min(left, CHUNK_BYTES))):
            yield piece
            left -= len(piece)
        stream.readline(CHUNK_BYTES)
        line = stream.readline(CHUNK_BYTES)


def _chunk_size(line: bytes) -> int | None:
    found = re.match(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\r\n]*)?\r?\n", line)
    return None if found is None else int(found[1], 16)


_TELLING_BYTES = 16


def _inflated(pieces: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    """The pieces, unpacked. No unpacked piece is large, however well it was compressed."""
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
                yield packed.decompress(piece, CHUNK_BYTES)
            except zlib.error as error:
                raise ValueError(f"content encoding {encoding} is damaged: {error}") from error
            piece = packed.unconsumed_tail


def _decompressor(first: bytes) -> Any:
    """The decompressor for gzip, zlib or bare deflate, whichever fits the first piece; None if none does."""
    if first.startswith(b"\x1f\x8b"):
        return zlib.decompressobj(zlib.MAX_WBITS | 16)
    for window in (zlib.MAX_WBITS, -zlib.MAX_WBITS):
        try:
            zlib.decompressobj(window).decompress(first, 64)
        except zlib.error:
            continue  # the next form may fit
        return zlib.decompressobj(window)
    return None
