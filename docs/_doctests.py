"""For the reference: examples in docstrings, `>>>` and what it prints, as code. Markdown takes them
for quotes.
"""

from typing import Any

import griffe


def fenced(text: str) -> str:
    """A docstring with each of its examples in a fence of its own: from `>>>` to the next empty
    line.
    """
    lines: list[str] = []
    indent: str | None = None  # of the example that these lines are in
    for line in text.splitlines():
        bare = line.lstrip()
        if indent is None and bare.startswith(">>> "):
            indent = line[: len(line) - len(bare)]
            lines += [*([""] if lines and lines[-1].strip() else []), f"{indent}```pycon"]
        elif indent is not None and not bare:
            lines.append(f"{indent}```")
            indent = None
        lines.append("" if bare == "<BLANKLINE>" else line)
    if indent is not None:
        lines.append(f"{indent}```")
    return "\n".join(lines)


class Examples(griffe.Extension):
    """Puts the examples of every docstring into fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """One function, class, module or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
