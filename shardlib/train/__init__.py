"""A run of steps: checkpoints, records, evaluation, resuming."""
