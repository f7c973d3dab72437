"""Faults in backups, and in how copies are recognized; each with the test that must find it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from perco.backup import chains, keeping, restoring, taking, trimming
from perco.backup.layout import Index, Used
from perco.backup.places import chain_of
from perco.clock.lost import LOST_ROW
from perco.storage import identity
from perco.storage.lmdb_tablet import LmdbTablet
from tests.testing.mutants_components import by, nothing

_BACKUP: Final = "tests/integration/backup/test_backup.py"
_RESTORED_AT: Final = "tests/integration/backup/test_restored_at.py"


@by(
    "tests/integration/backup/test_parking.py::test_no_tablet_is_written_to_and_reads_go_on",
    "B1 the writers are not parked",
)
def not_parked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LmdbTablet, "park", nothing)


@by(f"{_BACKUP}::test_backups_of_a_closed_store", "B3 a page is recognized by its number alone")
def by_number(patch: pytest.MonkeyPatch) -> None:
    class Same(bytes):
        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = bytes.__hash__

    class Loose(Used):
        def get(self, number: int) -> bytes | None:
            found = super().get(number)
            return None if found is None else Same(found)

    right = taking._Job._used

    def used(self: Any, tablet: Any) -> Used:
        loose = Loose()
        loose._digests = right(self, tablet)._digests
        return loose

    patch.setattr(taking._Job, "_used", used)


@by(f"{_BACKUP}::test_backups_of_a_closed_store", "B3 a page that is no longer used is not named")
def not_named(patch: pytest.MonkeyPatch) -> None:
    right = Index.pack

    def pack(self: Index) -> bytes:
        self.gone = []
        return right(self)

    patch.setattr(Index, "pack", pack)


@by(f"{_BACKUP}::test_backups_of_a_closed_store", "B2 an incremental backup knows only the pages of its base alone")
def only_the_base(patch: pytest.MonkeyPatch) -> None:
    right = taking.indexes_of

    def indexes(place: Any, chain: Any, *which: Any) -> Iterator[Any]:
        return right(place, chain[-1:], *which)

    patch.setattr(taking, "indexes_of", indexes)


@by(f"{_BACKUP}::test_old_backups_go_but_for_those_that_are_needed", "B2 a backup that another one needs is removed")
def needed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keeping, "chain_of", lambda folder, name: chain_of(folder, name)[-1:])


@by(f"{_BACKUP}::test_every_damage_to_a_backup_is_found[pages]", "B4 the digests of pages are not compared")
def not_compared(patch: pytest.MonkeyPatch) -> None:
    class Any_(bytes):
        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = bytes.__hash__

    patch.setattr(chains, "digest", lambda data: Any_())


@by(
    f"{_BACKUP}::test_a_restored_store_goes_on_above_all_timestamps_of_the_lost_one",
    "B5 a restored store goes on at the timestamp of the backup",
)
def goes_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restoring, "SKIPPED", 1)
    patch.setattr(restoring, "TIMESTAMPS_PER_S", 0)


@by(
    f"{_BACKUP}::test_a_restored_store_goes_on_above_all_timestamps_of_the_lost_one",
    "B5 a restored store does not know which timestamps are lost",
)
def not_known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(restoring, "lost_row", lambda lost: (LOST_ROW + b"?", (), ()))


@by(
    f"{_RESTORED_AT}::test_it_is_what_it_was_and_its_observers_go_on[0]",
    "B6 changes whose acknowledgements are removed do not wait again",
)
def not_again(patch: pytest.MonkeyPatch) -> None:
    async def again(*_: Any) -> list[Any]:
        return []

    patch.setattr(trimming, "_again", again)


@by(
    f"{_RESTORED_AT}::test_a_signal_that_was_raised_before_and_handled_after_is_handled_again",
    "B6 signals whose records are removed are not raised again",
)
def not_raised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trimming, "cause_of_run", lambda body, signal: None)


@by(f"{_BACKUP}::test_a_plain_copy_of_an_open_store_is_refused", "I1 a copy of an open store is opened")
def opened(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(identity, "_was_closed", lambda folder: True)


@by(
    f"{_BACKUP}::test_a_copy_that_was_begun_while_the_store_was_closed_is_refused_if_it_was_opened_meanwhile",
    "I1 a copy's last transactions are not compared with those that were noted",
)
def closed_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(identity, "_was_closed", lambda folder: (folder / "closed").exists())


@by(f"{_BACKUP}::test_a_copy_of_a_closed_store_is_a_store_of_its_own", "I1 a copy keeps the store's id")
def same_id(patch: pytest.MonkeyPatch) -> None:
    right = identity.put_identity

    def put(folder: Path, id: str = "") -> str:
        return right(folder, id or identity.identity_of(folder).id)

    patch.setattr(identity, "put_identity", put)
