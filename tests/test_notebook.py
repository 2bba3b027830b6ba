"""What notebooks show of what is made for people; and the notebooks of `examples/`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import optax
import pytest
from flax import nnx

import shardlib as sl
from models import gpt
from shardlib._notebook import Text


def test_tables_are_shown_as_they_are_printed():
    strategy = sl.Strategy(mesh="data=2,model=4", rules=sl.rules.data | sl.rules.tensor)
    mesh = sl.describe_mesh(strategy.device_mesh)
    assert mesh._repr_html_().startswith("<pre") and "data=2,model=4 on 8 cpu" in mesh._repr_html_()
    make = lambda: gpt.GPT(gpt.tiny(), rngs=nnx.Rngs(0))
    described = sl.describe(sl.init(make, optax.sgd(0.1), strategy, abstract=True))
    assert str(described).splitlines()[0] in described._repr_html_()
    # What is written like a tag is text.
    assert "&lt;b&gt;" in Text("<b>")._repr_html_()


def test_pictures_are_shown_as_such():
    timeline = sl.pipeline.simulate(sl.pipeline.OneFOneB(2, 4).table())
    picture = sl.pipeline.svg(timeline, "1F1B")
    assert picture._repr_svg_() == picture and picture.startswith("<svg")
    assert type(picture._repr_svg_()) is str


BOOKS = sorted((Path(__file__).parent.parent / "examples/notebooks").glob("*.ipynb"))
RUN = """
import ast, json, sys

shown, scope = 0, {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]))
    *before, last = tree.body
    if not isinstance(last, ast.Expr):
        before.append(last)
    exec(compile(ast.Module(before, []), sys.argv[1], "exec"), scope)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), sys.argv[1], "eval"), scope)
        show = getattr(value, "_repr_svg_", None) or getattr(value, "_repr_html_", None)
        shown += show is not None and len(show()) > 100
print(shown)
"""


@pytest.mark.long
@pytest.mark.sentinel("pipelines")
@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_notebooks_run_and_show_something(book):
    """Cell by cell in a process of its own, as Jupyter runs them."""
    command = [sys.executable, "-c", RUN, str(book)]
    root = Path(__file__).parent.parent
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 3
    said = json.loads(book.read_text())
    outputs = [cell["outputs"] for cell in said["cells"] if cell["cell_type"] == "code"]
    assert not any(outputs), "notebooks are kept without their outputs"


def test_there_are_three_notebooks_and_a_list_of_them():
    listed = (BOOKS[0].parent / "README.md").read_text()
    assert len(BOOKS) == 3
    for book in BOOKS:
        assert f"]({book.name})" in listed
