"""Compares two ways to keep a program's views: observers, change by change, and a batch that computes all rows again.

rows.py       a sample of the source rows
changing.py   the changes that are replayed: no I/O
keeping.py    a scratch store, whose observers keep the views while changes arrive
batching.py   the batch
measuring.py  measures both ways in turn, and checks that they give the same rows
costs.py      computes the rate from which on the batch costs less: no I/O
"""

from perco.crossover.batching import Batch as Batch, Making as Making
from perco.crossover.changing import Changes as Changes
from perco.crossover.costs import Comparison as Comparison, Costs as Costs, Curve as Curve, Line as Line
from perco.crossover.measuring import Found as Found, Plan as Plan, measure as measure
from perco.crossover.rows import (
    ROWS_LEAST as ROWS_LEAST,
    Sampler as Sampler,
    SourceRow as SourceRow,
    must_be_enough as must_be_enough,
)
