"""Pages that tell the truth: every `python` block of the README and the docs runs, in order, on its page."""

import inspect
import re
import warnings
from pathlib import Path

import pytest

import shardlib
import shardlib.testing

ROOT = Path(__file__).parent.parent
PAGES = [
    page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if "```python" in page.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_blocks_of_a_page_run(page, capsys):
    namespace = {}
    for block in re.finditer(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        line = page.read_text()[: block.start()].count("\n") + 1
        with warnings.catch_warnings():
            exec(compile("\n" * line + block[1], str(page), "exec"), namespace)
    if page.name == "tutorial.md":  # what it shows is what was printed
        printed = capsys.readouterr().out
        shown = re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL)
        assert shown
        for text in shown:
            assert text.strip() in printed


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_reference_lists_every_public_name():
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    public = [
        f"{module.__name__}.{name}"
        for module in (shardlib, shardlib.testing)
        for name, value in vars(module).items()
        if not name.startswith("_") and (value is shardlib.rules or not inspect.ismodule(value))
    ]
    assert sorted(listed) == sorted(public)
