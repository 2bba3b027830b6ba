"""What the name stacks tell that JAX gives to operations: which pass they are of."""


def is_backward(op_name: str) -> bool:
    """Whether a name stack is that of a backward pass, what it computes again included."""
    return "transpose(" in op_name


def is_forward(op_name: str) -> bool:
    """Whether a name stack is that of a forward pass which is differentiated."""
    return "jvp(" in op_name and not is_backward(op_name)
