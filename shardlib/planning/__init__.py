"""What a machine will do with a step, without the machine: targets, the compilers, and what their programs say."""
