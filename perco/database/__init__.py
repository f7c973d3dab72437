"""An open store, put together: what a program does with it, and what its owner does for it."""
