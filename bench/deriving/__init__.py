"""One pure function of each document, kept up to date by perco and by its peers: the programs that `bench derive` runs.

A program runs in a process of its own; a peer's in an environment of its own, so it imports nothing but `corpus` and
`child`, which need only Python.
"""
