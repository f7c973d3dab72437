"""An administrator's tasks for a store on Bigtable: make its table, and examine the table and the app profile.

`perco bigtable init|check` call this module; nothing in it claims the store. A program that uses the store needs only
the role `roles/bigtable.user` on the instance or the table. To make the table, an administrator needs
`roles/bigtable.admin`; to examine it, `roles/bigtable.viewer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from perco.bigtable.address import Place
from perco.bigtable.calls import ADMIN_HOST, SERVICE, channel, metadata_of
from perco.bigtable.keys import FAMILIES
from perco.bigtable.owner_row import notice_in, question
from perco.bigtable.wire import admin_types, grpc, types
from perco.errors import PercoError, StoreError, Unavailable

_TABLES: Final = "/google.bigtable.admin.v2.BigtableTableAdmin/"
_INSTANCES: Final = "/google.bigtable.admin.v2.BigtableInstanceAdmin/"
_CALL_S: Final = 30.0
_SCHEMA_VIEW: Final = 2


@dataclass(frozen=True, slots=True)
class Facts:
    """The findings of `inspect`.

    Attributes: `owner`, the command of the process that owns the store, "" for none; `findings`, sentences about what
    is wrong, each with its remedy; `unknown`, sentences about what could not be examined.
    """

    owner: str = ""
    findings: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


class _Link:
    """Blocking calls to the admin service and the data service."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._admin = channel(place, ADMIN_HOST)
        self._data = channel(place)

    def admin(self, method: str, request: Any, response: Any, **fields: Any) -> Any:
        call = self._admin.unary_unary(
            method, request_serializer=request.SerializeToString, response_deserializer=response.FromString
        )
        made = request(**fields)
        named = fields.get("name") or fields.get("parent")
        key = "name" if "name" in fields else "parent"
        return call(made, timeout=_CALL_S, metadata=(("x-goog-request-params", f"{key}={named}"),))

    def owner(self) -> str:
        t = types()
        call = self._data.unary_stream(
            SERVICE + "ReadRows",
            request_serializer=t.ReadRows.SerializeToString,
            response_deserializer=t.ReadRowsResponse.FromString,
        )
        answer = call(question(self.place), timeout=_CALL_S, metadata=metadata_of(self.place))
        return notice_in(answer).holder.told

    def close(self) -> None:
        self._admin.close()
        self._data.close()


@contextmanager
def _linked(place: Place) -> Iterator[_Link]:
    """Raises: StoreError, Unavailable."""
    link = _Link(place)
    try:
        yield link
    except grpc().RpcError as error:
        raise _told(place, error) from error
    finally:
        link.close()


def _told(place: Place, error: Any) -> PercoError:
    code, said = error.code().name, " ".join((error.details() or "").split())[:500]
    if code == "PERMISSION_DENIED":
        return StoreError(
            f"{place.shown}: {said}. Making the table needs roles/bigtable.admin on the instance; examining it needs "
            "roles/bigtable.viewer"
        )
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
        return Unavailable(f"{place.shown} cannot be reached: {said or code}")
    return StoreError(f"{place.shown}: {code}: {said}")


def init(url: str) -> bool:
    """Make the table of a store, unless it is there. Returns whether the table was made. Blocks. Raises: UsageError,
    StoreError."""
    place, t = Place(url), admin_types()
    with _linked(place) as link:
        # Without rules for garbage collection, because perco removes old versions itself.
        families: dict[str, dict[str, Any]] = {name: {} for name in FAMILIES}
        try:
            link.admin(
                _TABLES + "CreateTable",
                *(t.CreateTable, t.Table),
                parent=place.instance,
                table_id=place.prefix,
                table={"column_families": families},
            )
        except grpc().RpcError as error:
            if error.code().name != "ALREADY_EXISTS":
                raise
            return False
    return True


def inspect(url: str) -> Facts:
    """Examine the table and the app profile. Blocks. Raises: UsageError, StoreError."""
    place, t = Place(url), admin_types()
    findings, unknown = [], []
    with _linked(place) as link:
        try:
            found = link.admin(_TABLES + "GetTable", *(t.GetTable, t.Table), name=place.table, view=_SCHEMA_VIEW)
        except grpc().RpcError as error:
            if error.code().name != "NOT_FOUND":
                raise
            return Facts(findings=("there is no such table: perco bigtable init makes it",))
        findings += _wrong_families(found)
        profile = f"{place.instance}/appProfiles/{place.app_profile or 'default'}"
        try:
            findings += _wrong_profile(
                link.admin(_INSTANCES + "GetAppProfile", *(t.GetAppProfile, t.AppProfile), name=profile)
            )
        except grpc().RpcError as error:
            code = error.code().name
            if code == "NOT_FOUND":
                findings.append(f"there is no app profile {profile.rpartition('/')[2]}: make it, or name another one")
            elif code in ("UNIMPLEMENTED", "PERMISSION_DENIED"):
                unknown.append(f"the app profile could not be examined: {code}")
            else:
                raise
        owner = link.owner() if not any("family" in finding for finding in findings) else ""
    return Facts(owner, tuple(findings), tuple(unknown))


def _wrong_families(table: Any) -> list[str]:
    findings = []
    for name in FAMILIES:
        if name not in table.column_families:
            findings.append(f"column family {name} is missing: perco bigtable init makes a table with it")
        elif table.column_families[name].gc_rule.ByteSize():
            findings.append(
                f"column family {name} has a garbage-collection rule, which removes cells that transactions need: "
                "remove the rule; perco removes old versions itself"
            )
    return findings


def _wrong_profile(profile: Any) -> list[str]:
    if profile.HasField("multi_cluster_routing_use_any"):
        return [
            "the app profile routes to any cluster: rows are not atomic there. Use one with routing to a single "
            "cluster and single-row transactions: app_profile=NAME in the address"
        ]
    if profile.HasField("single_cluster_routing") and not profile.single_cluster_routing.allow_transactional_writes:
        return ["the app profile does not allow single-row transactions: allow them, or name one that does"]
    return []
