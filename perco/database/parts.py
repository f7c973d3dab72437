"""The parts of a database."""

from __future__ import annotations

from dataclasses import dataclass

from perco.clock.oracle import Oracle
from perco.database.owner import Owner
from perco.notify.failures import FailedList
from perco.notify.observers import ObserverStates
from perco.notify.waiting import Waiting
from perco.notify.workers import Workers
from perco.schema.catalogue import Catalogue
from perco.schema.known import Known
from perco.storage import RowStore
from perco.txn.background import Background
from perco.txn.driver import Driver
from perco.txn.engine import Engine, Place
from perco.txn.fates import Fates
from perco.txn.keeping import Keeper


@dataclass(frozen=True)
class Parts:
    """Loop thread only. The properties are shortcuts to parts of the engine."""

    engine: Engine
    keeper: Keeper
    workers: Workers
    waiting: Waiting
    failed: FailedList
    observers: ObserverStates
    owner: Owner

    @property
    def place(self) -> Place:
        return self.engine.place

    @property
    def store(self) -> RowStore:
        return self.engine.driver.store

    @property
    def driver(self) -> Driver:
        return self.engine.driver

    @property
    def oracle(self) -> Oracle:
        return self.engine.oracle

    @property
    def fates(self) -> Fates:
        return self.engine.fates

    @property
    def background(self) -> Background:
        return self.engine.background

    @property
    def known(self) -> Known:
        return self.engine.known

    @property
    def catalogue(self) -> Catalogue:
        return self.engine.known.catalogue
