"""The training step: its strategy, its state, its gradients and its update."""
