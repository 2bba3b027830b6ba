"""A run: strategy, state and step."""
