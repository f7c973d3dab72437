"""Copies of whole stores."""
