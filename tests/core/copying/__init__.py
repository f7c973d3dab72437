"""Comparing rows."""
