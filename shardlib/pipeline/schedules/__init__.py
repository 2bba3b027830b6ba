"""Schedules as tables of operations, played through and drawn without JAX."""
