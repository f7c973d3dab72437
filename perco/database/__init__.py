"""An open store: the operations that a program calls, and the work that the owner does for the store."""
