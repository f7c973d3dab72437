"""Test tools, for users and for perco's own tests.

`record` notes what clients did and saw: a history (`history.py`). `check` decides whether a history satisfies snapshot
isolation, or is serializable. If not, it names each anomaly, with a shortest cycle if there is one (`isolation.py`).
`draw` draws an anomaly (`drawing.py`).

    python -m perco.testing history.jsonl

`simulate` (`simulation.py`) makes a run from one seed: clients and observers in processes that die, over a network that
loses, delays, repeats and reorders messages. `python -m perco.testing.simulate --seeds 2000` makes many runs.
`workloads.py` defines what the clients do. Every choice of a run is in a `Plan` (`plan.py`), and a failing run can be
shrunk to a short script (`shrink.py`).

For an embedded store (`embedded.py`), `FaultyRowStore` (`faults.py`) acts as the network, and `Machine` (`machine.py`)
is a memory store that outlives processes. For a served store (`served.py`), the simulation drives the production code,
in processes that are stopped and killed (`processes.py`), over connections that break (`network.py`) and a disk in
memory (`disk.py`).

`sweep.py` runs a scenario with every fault at every step, and with pairs of faults.
"""

from perco.testing.drawing import draw as draw
from perco.testing.history import (
    Ops as Ops,
    Recorder as Recorder,
    Transaction as Transaction,
    load as load,
    record as record,
)
from perco.testing.isolation import Anomaly as Anomaly, Edge as Edge, Report as Report, check as check
