"""The lease under which a process owns a store on Bigtable (O1): one row, changed by CheckAndMutateRow.

The row has a numbered cell for each change of owner and each renewal (`owner_row`). A change is made only if there is
no cell above the last one that the sender of the change has seen. So if two processes claim the store at once, Bigtable
refuses one of them.

The lease's row cannot guard other rows, as a transaction of PostgreSQL can. So a mutation of a former owner may take
effect late, like a mutation of a dead client. Other processes roll its locks back; a commit whose locks have been
rolled back fails (T8). The former owner draws no more timestamps, so it cannot begin another commit (O1).
"""

from __future__ import annotations

from typing import Any, Final

from perco.bigtable.address import Place
from perco.bigtable.calls import SERVICE, channel, metadata_of
from perco.bigtable.owner_row import Holder, change, notice_in, question
from perco.bigtable.wire import grpc, types
from perco.storage.lease import Lease

_CALL_S: Final = 5.0  # how long one call of the lease's thread may take, at most
CALLS: Final = 3  # calls within the length of a lease, so that one call that hangs does not cost the lease


class BigtableLease(Lease):
    """Renews the lease over a channel of its own, even while the loop is held."""

    said: str

    def __init__(self, place: Place, holder: Holder, lease_s: float, claimed_at: float) -> None:
        super().__init__(place.shown, lease_s, claimed_at)
        self._place, self._holder = place, holder
        self._channel: Any = None

    def renew(self) -> bool | None:
        """See `Lease.renew`."""
        return self._change(self._holder)

    def release(self) -> None:
        """See `Lease.release`."""
        self._change(self._holder._replace(token="", told=""))

    def _connect(self) -> None:
        t = types()
        self._channel = channel(self._place)
        self._write = self._channel.unary_unary(
            SERVICE + "CheckAndMutateRow",
            request_serializer=t.CheckAndMutateRow.SerializeToString,
            response_deserializer=t.CheckAndMutateRowResponse.FromString,
        )
        self._read = self._channel.unary_stream(
            SERVICE + "ReadRows",
            request_serializer=t.ReadRows.SerializeToString,
            response_deserializer=t.ReadRowsResponse.FromString,
        )

    def _change(self, wanted: Holder) -> bool | None:
        holder = self._holder
        wanted = wanted._replace(number=holder.number + 1)
        if self._channel is None:
            self._connect()
        limits = {"timeout": min(_CALL_S, self._lease_s / CALLS), "metadata": metadata_of(self._place)}
        try:
            refused = self._write(change(self._place, wanted), **limits).predicate_matched
            if refused:  # another process has changed the row; or this one has, in an attempt whose answer was lost
                now_holder = notice_in(self._read(question(self._place), **limits)).holder
                if now_holder.token != holder.token:
                    return False
                if now_holder.number == holder.number:
                    self._asked_at, self.said = 0.0, "a change of the lease is neither made nor refused"
                    return None
                # An earlier change of this process was made. Other processes count the lease from that change, so this
                # one must still be made.
                self._holder = now_holder
                return self._change(wanted)
        except grpc().RpcError as error:
            self.said = f"{error.code().name}: {' '.join((error.details() or '').split())[:300]}"
            self._asked_at = 0.0
            return None
        self._holder = holder._replace(number=wanted.number)
        return True

    def close(self) -> None:
        """See `Lease.close`."""
        if self._channel is not None:
            self._channel.close()
