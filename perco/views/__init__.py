"""Views: derived tables that are declared once. Observers keep them, and a batch build proves them."""

from perco.views.accepting import accept as accept, accept_blocking as accept_blocking
from perco.views.aggregates import (
    Aggregate as Aggregate,
    count as count,
    largest as largest,
    smallest as smallest,
    sum as sum,
)
from perco.views.cached import Cached as Cached
from perco.views.checking import (
    Checked as Checked,
    Difference as Difference,
    check as check,
    check_blocking as check_blocking,
)
from perco.views.comparing import Diff as Diff, Failure as Failure, diff as diff, diff_blocking as diff_blocking
from perco.views.compiled import First as First, Prefix as Prefix, first as first, prefix as prefix
from perco.views.declaring import Views as Views
from perco.views.dropping import (
    Dropped as Dropped,
    drop as drop,
    drop_blocking as drop_blocking,
    would_drop as would_drop,
    would_drop_blocking as would_drop_blocking,
)
from perco.views.explaining import Input as Input, Reason as Reason, why as why, why_blocking as why_blocking
from perco.views.files import Files as Files
from perco.views.lance import LanceTable as LanceTable
from perco.views.near import near_duplicates as near_duplicates, words as words
from perco.views.postgres import PostgresTable as PostgresTable
from perco.views.rebuilding import Rebuilt as Rebuilt, rebuild as rebuild, rebuild_blocking as rebuild_blocking
from perco.views.rows import Group as Group, Put as Put
from perco.views.sinking import Delivered as Delivered, Readable as Readable, Sink as Sink, Sinking as Sinking
from perco.views.sqlite import SqliteTable as SqliteTable
from perco.views.vectors import Hit as Hit, VectorTable as VectorTable
