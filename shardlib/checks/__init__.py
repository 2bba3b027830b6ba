"""Checks of arguments: each gives the value back, or says what it takes."""
