"""Backups of a store's files: taken while the store is in use, incremental, verified, restored as of any timestamp."""
