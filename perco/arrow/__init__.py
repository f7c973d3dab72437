"""Rows as Arrow record batches: the types of columns, and the cells in the pages of a tablet's file. Pure."""
