"""Traced functions as data: their equations are read, taken apart and rewritten."""
