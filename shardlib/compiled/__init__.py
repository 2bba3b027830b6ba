"""Compiled programs as data: their collectives, their memory, and the lines that made them."""
