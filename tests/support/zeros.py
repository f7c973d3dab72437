"""Rows with many zero bytes, whose keys are written in three ways (perco/storage/keys.py)."""

from __future__ import annotations

from hypothesis import strategies as st

dense_rows = st.lists(st.sampled_from([b"\x00", b"\x00" * 7, b"\x00" * 31, b"\x01", b"a", b"\xff"]), max_size=12).map(
    b"".join
)
