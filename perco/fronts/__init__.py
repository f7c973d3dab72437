"""The common part of `perco.sync` and `perco.aio`: calls from outside into the loop that a store runs on."""
