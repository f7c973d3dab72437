"""The request of a scan of a log, as a server decodes it (R1)."""

from __future__ import annotations

from typing import Any

import pytest

from perco.serve.messages import read_scan
from perco.storage import LOCK, WRITE, ScanQuery, ScanRequest

GOOD = ScanRequest("docs", b"", None, (ScanQuery(WRITE, None, 1, 9, 2),), log=b"position")


def test_a_request_is_decoded_as_it_was_sent() -> None:
    packed = tuple(GOOD._replace(queries=tuple(map(tuple, GOOD.queries))))  # type: ignore[arg-type]
    assert read_scan(packed) == GOOD


@pytest.mark.parametrize(
    "changed",
    [
        {"log": "text"},
        {"log": 7},
        {"queries": ()},
        {"queries": (ScanQuery(WRITE, None), ScanQuery(WRITE, None))},
        {"queries": (ScanQuery(LOCK, None),)},
        {"reverse": True},
    ],
)
def test_what_is_not_a_scan_of_a_log_is_refused(changed: dict[str, Any]) -> None:  # R1
    with pytest.raises((TypeError, ValueError)):
        read_scan(tuple(GOOD._replace(**changed)))
