"""Key bytes: (row, column, timestamp), encoded so that LMDB's memcmp sorts them in that order.

    key = escaped row | column, 4 bytes big-endian | (2^64 - 1 - timestamp), 8 bytes big-endian

So the cells of a table are ordered by row, bytewise, then by column, then newest first: "the newest version at or below
S" is one seek.

Rows are made prefix-free by escaping. In a row with fewer than 32 zero bytes, the normal case,

    0x00 -> 0x00 0xff          end of row -> 0x00 0x01

After a 32nd zero byte, the rest of the row is written in groups of eight bytes, so that a row of 400 zero bytes still
fits into LMDB's 511 bytes. The last group is padded with zeros. Each group is followed by one byte: 0xff if another
group follows, else the number of the group's bytes that belong to the row. Where the groups begin depends only on the
bytes before them, so the order of the rows is kept.

The entries of a log (E1) are sorted by time instead, and are as long:

    key = timestamp, 8 bytes big-endian | escaped row | column, 4 bytes big-endian

0x00 0x02 is reserved: "this row is longer than a key can be and continues elsewhere".
"""

from __future__ import annotations

import struct
from typing import Final

from perco.errors import Corruption
from perco.storage.cells import ROW_BYTES_MAX

_TAIL = struct.Struct(">IQ")
_INVERT: Final = (1 << 64) - 1
TAIL_BYTES: Final = _TAIL.size
_END: Final = b"\x00\x01"
_ESCAPED: Final = b"\x00\xff"
_PLAIN_ZEROS: Final = 32
_PAST: Final = b"\xff" * (TAIL_BYTES + 1)  # added to a row's prefix, it sorts after every cell of the row

_pack = _TAIL.pack
_pack_log_ts = struct.Struct(">Q").pack
_pack_column = struct.Struct(">I").pack
_unpack = _TAIL.unpack_from


def escape(row: bytes) -> bytes:
    """The prefix of all keys of `row`."""
    if 0 not in row:
        return row + _END
    if row.count(0) < _PLAIN_ZEROS:
        return row.replace(b"\x00", _ESCAPED) + _END
    return _escape_dense(row)


def _escape_dense(row: bytes) -> bytes:
    at = -1
    for _ in range(_PLAIN_ZEROS):
        at = row.index(0, at + 1)
    out = bytearray(row[: at + 1].replace(b"\x00", _ESCAPED))
    rest = row[at + 1 :]
    for i in range(0, max(len(rest), 1), 8):
        piece = rest[i : i + 8]
        out += piece.ljust(8, b"\x00")
        out.append(0xFF if i + 8 < len(rest) else len(piece))
    return bytes(out)


def unescape(prefix: bytes) -> bytes:
    """The row of a prefix made by `escape`.

    Raises: Corruption for bytes that `escape` never makes.
    """
    zeros = prefix.count(0)
    if zeros <= _PLAIN_ZEROS and prefix.endswith(_END):
        if zeros == 1:
            return prefix[:-2]
        if prefix.count(_ESCAPED) == zeros - 1:  # all but the zero of the end mark
            return prefix[:-2].replace(_ESCAPED, b"\x00")
    row = _unescape_zeros(prefix)
    if escape(row) != prefix:
        raise Corruption(f"key {prefix.hex()}", "the row is not written as it should be")
    return row


def _unescape_zeros(prefix: bytes) -> bytes:
    out = bytearray()
    at = 0
    for _ in range(_PLAIN_ZEROS):
        nul = prefix.find(0, at)
        if nul < 0 or nul + 1 >= len(prefix):
            raise Corruption(f"key {prefix.hex()}", "the row has no end")
        out += prefix[at:nul]
        if prefix[nul + 1] == 0x01:
            return bytes(out)
        if prefix[nul + 1] != 0xFF:
            raise Corruption(f"key {prefix.hex()}", "an unknown escape in the row")
        out.append(0)
        at = nul + 2
    return bytes(out) + _ungroup(prefix, at)


def _ungroup(prefix: bytes, at: int) -> bytes:
    out = bytearray()
    while True:
        piece = prefix[at : at + 9]
        if len(piece) < 9 or (piece[8] > 8 and piece[8] != 0xFF):
            raise Corruption(f"key {prefix.hex()}", "a broken group in the row")
        if piece[8] != 0xFF:
            return bytes(out + piece[: piece[8]])
        out += piece[:8]
        at += 9


def cell_key(prefix: bytes, column: int, ts: int) -> bytes:
    """The key of one cell; `prefix` is `escape(row)`."""
    return prefix + _pack(column, _INVERT - ts)


def past_row(prefix: bytes) -> bytes:
    """A key after every cell of the row and before every cell of the next."""
    return prefix + _PAST


def split_key(key: bytes) -> tuple[bytes, int, int]:
    """(prefix, column, timestamp) of a cell's key."""
    cut = len(key) - TAIL_BYTES
    if cut < 2:
        raise Corruption(f"key {key.hex()}", "too short for a cell")
    column, inverted = _unpack(key, cut)
    return key[:cut], column, _INVERT - inverted


def log_key(prefix: bytes, column: int, ts: int) -> bytes:
    """The key of a cell in its tablet's log, where the oldest cells come first (E1)."""
    return _pack_log_ts(ts) + prefix + _pack_column(column)


def split_log_key(key: bytes) -> tuple[bytes, int, int]:
    """(prefix, column, timestamp) of a key in a log."""
    if len(key) < TAIL_BYTES + 2:
        raise Corruption(f"key {key.hex()}", "too short for an entry of the log")
    return key[8:-4], int.from_bytes(key[-4:], "big"), int.from_bytes(key[:8], "big")


def longest_key() -> int:
    """The length of the longest key that a row within the limit can have; it must not exceed LMDB's 511 bytes.

    In that row, the 32nd zero is at a place that leaves one byte for the last group.
    """
    return max(
        len(cell_key(escape(b"\x01" * ones + b"\x00" * (ROW_BYTES_MAX - ones)), 0, 1))
        for ones in range(ROW_BYTES_MAX + 1)
    )
