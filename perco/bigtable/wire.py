"""Google's messages and gRPC. They are imported only when a store on Bigtable is opened: the rest of perco does not
need them."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Final

from perco.errors import UsageError

INSTALL: Final = "a store on Bigtable needs Google's client: pip install 'perco[bigtable]'"


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{INSTALL} ({error})") from error


@cache
def grpc() -> Any:
    """The module `grpc`. Raises: UsageError, if it is not installed."""
    return _imported("grpc")


@cache
def google_auth() -> tuple[Any, Any]:
    """The modules `google.auth` and `google.auth.transport`. Raises: UsageError, if they are not installed."""
    for name in ("google.auth.transport.grpc", "google.auth.transport.requests"):
        _imported(name)
    return _imported("google.auth"), _imported("google.auth.transport")


class Types:
    """The protocol-buffer classes of the data API, without the wrappers of Google's client."""

    def __init__(self) -> None:
        data = _imported("google.cloud.bigtable_v2.types.data")
        calls = _imported("google.cloud.bigtable_v2.types.bigtable")
        self.RowFilter: Any = data.RowFilter.pb()
        self.Mutation: Any = data.Mutation.pb()
        self.ReadRows: Any = calls.ReadRowsRequest.pb()
        self.ReadRowsResponse: Any = calls.ReadRowsResponse.pb()
        self.SampleRowKeys: Any = calls.SampleRowKeysRequest.pb()
        self.SampleRowKeysResponse: Any = calls.SampleRowKeysResponse.pb()
        self.MutateRow: Any = calls.MutateRowRequest.pb()
        self.MutateRowResponse: Any = calls.MutateRowResponse.pb()
        self.CheckAndMutateRow: Any = calls.CheckAndMutateRowRequest.pb()
        self.CheckAndMutateRowResponse: Any = calls.CheckAndMutateRowResponse.pb()


class AdminTypes:
    """The protocol-buffer classes of the admin API."""

    def __init__(self) -> None:
        calls = _imported("google.cloud.bigtable_admin_v2.types.bigtable_table_admin")
        tables = _imported("google.cloud.bigtable_admin_v2.types.table")
        instances = _imported("google.cloud.bigtable_admin_v2.types.bigtable_instance_admin")
        self.Table: Any = tables.Table.pb()
        self.AppProfile: Any = _imported("google.cloud.bigtable_admin_v2.types.instance").AppProfile.pb()
        self.CreateTable: Any = calls.CreateTableRequest.pb()
        self.GetTable: Any = calls.GetTableRequest.pb()
        self.GetAppProfile: Any = instances.GetAppProfileRequest.pb()


@cache
def types() -> Types:
    """The classes of the data API. Raises: UsageError, if they are not installed."""
    return Types()


@cache
def admin_types() -> AdminTypes:
    """The classes of the admin API. Raises: UsageError, if they are not installed."""
    return AdminTypes()
