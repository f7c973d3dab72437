"""Random graphs of views as programs: `tests.spark.graph_app:views_7` is the graph of seed 7, in each process anew."""

from __future__ import annotations

from functools import cache

from perco import views
from perco.testing.graphs import Graph


@cache
def graph(seed: int) -> Graph:
    return Graph(seed)


def __getattr__(name: str) -> views.Views:
    head, _, seed = name.partition("_")
    if head != "views" or not seed.isdecimal():
        raise AttributeError(name)
    return graph(int(seed)).views
