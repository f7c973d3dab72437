"""What `perco.sync` and `perco.aio` have in common: calls that come from outside into the loop that a store runs on."""
