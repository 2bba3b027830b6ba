"""What notebooks show of what is made for people: tables, their columns in line, and pictures."""

from html import escape


class Shown:
    """A value that a notebook shows by its text, as `print` does."""

    def _repr_html_(self) -> str:
        return preformatted(str(self))


class Text(str):
    """A text of several lines, which a notebook shows as `print` does."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return preformatted(self)


class Picture(str):
    """The text of an SVG file, which a notebook shows as a picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def preformatted(text: str) -> str:
    """HTML of a text whose letters have one width, and whose lines are not broken.

    >>> preformatted("a < b")
    '<pre style="white-space: pre; line-height: 1.2">a &lt; b</pre>'
    """
    return f'<pre style="white-space: pre; line-height: 1.2">{escape(text)}</pre>'
