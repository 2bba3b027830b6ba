"""The name stacks that JAX gives to operations: their text, and which pass they are of."""

import re

# Letters that a text of HLO has in another form: quotes, backslashes, and all that are not ASCII,
# byte by byte.
_ESCAPED = re.compile(rb"\\([0-7]{3}|.)")
_CONTROLS = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def op_name_in(attributes: str) -> str:
    r"""The `op_name` of the metadata among attributes, or empty text.

    >>> op_name_in(r'metadata={op_name="params[\"head\'s \303\251\"]" stack_frame_id=3}')
    'params["head\'s é"]'
    """
    found = re.search(r'\bop_name="([^"\\]*(?:\\.[^"\\]*)*)"', attributes)
    if found is None:
        return ""
    name = found[1]
    if "\\" not in name:
        return name
    return _ESCAPED.sub(_unescaped, name.encode()).decode(errors="replace")


def _unescaped(match: re.Match[bytes]) -> bytes:
    """The byte that an escaped one stands for."""
    letter = match[1]
    if len(letter) == 3:
        return bytes([int(letter, 8)])
    return _CONTROLS.get(letter, letter)


def is_backward(op_name: str) -> bool:
    """Whether a name stack is that of a backward pass, what it computes again included."""
    return "transpose(" in op_name


def is_forward(op_name: str) -> bool:
    """Whether a name stack is that of a forward pass which is differentiated."""
    return "jvp(" in op_name and not is_backward(op_name)
