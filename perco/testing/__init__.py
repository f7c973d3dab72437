"""Test tools, for users and for perco's own tests.

`record` notes what clients did and saw (`history.py`); `check` decides whether that is snapshot isolation, or
serializable, and if not, names the anomaly with a shortest cycle (`isolation.py`); `draw` draws it (`drawing.py`).

    python -m perco.testing history.jsonl

`simulate` runs clients, observers and processes that die, over a network that loses, delays, repeats and reorders
messages, from one seed (`simulation.py`): `python -m perco.testing.simulate --seeds 2000`. `workloads.py` has what
clients do; every choice is in a `Plan` (`plan.py`), and a run that fails shrinks to a short script (`shrink.py`).

For an embedded store (`embedded.py`), `FaultyRowStore` (`faults.py`) is the network, and `Machine` (`machine.py`) a
memory store that outlives processes. For a served store (`served.py`), the simulation drives the code that ships: its
processes (`processes.py`) are stopped and killed, over connections that break (`network.py`) and a disk in memory
(`disk.py`).

`sweep.py` takes a scenario through every fault at every step, and through pairs of them.
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
