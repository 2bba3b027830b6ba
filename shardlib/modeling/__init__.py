"""What a model's author calls: names on parameters, layers, randomness, the batch."""
