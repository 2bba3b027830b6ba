"""What optax lacks, as optax transformations."""

from shardlib.optimizers._each import each as each
