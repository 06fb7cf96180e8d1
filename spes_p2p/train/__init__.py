"""Batches in, optimizer steps out, on one or several ranks of a peer. Knows no network."""
