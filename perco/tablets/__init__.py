"""The tablets of a store that this process has open: opening, splitting, compacting."""
