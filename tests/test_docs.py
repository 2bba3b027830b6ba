"""Pages that tell the truth: every `python` block of the README and the docs runs, in order, on its
page, and prints what is shown after it; every command is one that its program takes.
"""

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
import xml.etree.ElementTree
from pathlib import Path

import optax
import pytest
from flax import nnx

import shardlib
import shardlib.collectives
import shardlib.data
import shardlib.experts
import shardlib.kernels
import shardlib.launch
import shardlib.optimizers
import shardlib.testing
from examples import finetune
from examples.fields import override
from examples.find_run import from_command_line
from models import gpt, hub
from shardlib.__main__ import parser
from shardlib.pipeline.schedules._draw import DARK

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [ROOT / "examples" / name for name in ("train_lm.py", "finetune.py")]
LAUNCH = sorted((ROOT / "examples" / "launch").iterdir())
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
FIRST_RUN = ROOT / "docs" / "how-to" / "first-run.md"

# The first run of the docs, of a model and a length that a test can wait for.
SMALL = (
    "--model.layers 1 --model.width 16 --model.heads 2 --model.context 64 --model.hidden 32 "
    "--batch 8 --loop.steps 4 --optimizer.warmup 1 --loop.log_every 1 --loop.evaluate_every 2 "
    "--loop.save_every 2 --loop.profile 2,1 --evaluation_batches 1 --tensorboard true"
)


def called(page):
    return str(page.relative_to(ROOT))


def commands(page, program):
    """What follows a program in the commands of a page."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for found in re.findall(rf"""{program}\b((?:"[^"\n]*"|[^\n`#&|;"])*)""", text):
        yield shlex.split(found)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder to work in, for pages that write."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long(
    "docs/how-to/experts.md",
    "docs/how-to/finetune.md",
    "docs/how-to/first-run.md",
    "docs/how-to/generate.md",
    "docs/how-to/logging.md",
    "docs/how-to/models.md",
    "docs/how-to/own-model.md",
    "docs/how-to/precision.md",
    "docs/how-to/resume.md",
    "docs/how-to/weights.md",
    "docs/kernels.md",
    "docs/pipelines.md",
    "docs/plan.md",
    "docs/tutorial.md",
)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=called
)
def test_docs_code_blocks_run_and_print_what_is_shown(page, elsewhere, capsys):
    if page == FIRST_RUN:
        take_the_first_run(elsewhere)
    namespace = {}
    for block in BLOCK.finditer(page.read_text()):
        line = page.read_text()[: block.start()].count("\n") + 1
        with warnings.catch_warnings():
            exec(compile("\n" * line + block[1], str(page), "exec"), namespace)
        printed = "".join(capsys.readouterr())
        if block[2]:
            assert block[2].strip() in printed


def take_the_first_run(folder):
    """Leave the folder as the first command of its page does, and hold its listing to that."""
    environment = os.environ | {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    command = [sys.executable, str(ROOT / "examples" / "train_lm.py"), "tiny", *SMALL.split()]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    (listing,) = re.findall(r"```text\nruns/tiny/\n(.*?)```", FIRST_RUN.read_text(), re.DOTALL)
    listed = re.findall(r"^  (\w\S*)", listing, re.MULTILINE)
    assert sorted(one.name for one in (folder / "runs/tiny").iterdir()) == sorted(
        name.rstrip("/") for name in listed
    )


@pytest.mark.parametrize("page", [*EXAMPLES, *PAGES, *LAUNCH], ids=called)
def test_docs_commands_are_accepted_by_their_programs(page, elsewhere):
    for block in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", page.read_text(), re.DOTALL):
        Path(block[1]).write_text(block[0])
    written = Path("runs/tiny/run.json")  # by the first of them
    written.parent.mkdir(parents=True)
    written.write_text(json.dumps(from_command_line(["tiny"]).lines()))
    for arguments in commands(page, r"python examples/train_lm\.py"):
        try:
            from_command_line(arguments)
        except SystemExit as end:
            assert end.code == 0, f"{arguments}: {end}"  # it was asked for help
    for _, files, *changes in commands(page, r"python examples/finetune\.py"):
        override(finetune.tuned(str(published_folder()), files), changes)
    for arguments in commands(page, r"python -m shardlib\.launch"):
        if arguments:
            shardlib.launch._parse(arguments)
    for arguments in commands(page, "python -m shardlib plan"):
        if arguments:
            options = parser().parse_args(["plan", *arguments])
            shardlib.Target(options.target)
            path, _, function = options.make_step.partition(":")
            assert f"def {function or 'run'}(" in (ROOT / path).read_text()
    for arguments in commands(page, "python -m shardlib pipeline"):
        parser().parse_args(["pipeline", *arguments])


def published_folder():
    """A folder that has what `finetune.py` looks at before it reads weights and texts."""
    folder = Path("published")
    folder.mkdir(exist_ok=True)
    config = gpt.llama31_8b()
    (folder / "config.json").write_text(json.dumps(hub.description(config)))
    (folder / "tokenizer.json").write_text('{"post_processor": null}')
    return folder


def test_docs_install_commands_name_existing_extras():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in PAGES:
        for extras in re.findall(
            r"pip install (?:-e )?\"(?:\.|shardlib)\[([\w,-]+)\]", page.read_text()
        ):
            assert set(extras.split(",")) <= set(known), f"{called(page)}: [{extras}]"


def test_the_image_is_made_of_extras_and_files_that_there_are():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (ROOT / "Containerfile").read_text()
    named = re.findall(r"EXTRAS=([\w,-]+)", text) + re.findall(r"`([\w,-]+)` for", text)
    assert len(named) >= 4
    for extras in named:
        assert set(extras.split(",")) <= set(known), extras
    programs = re.findall(r"examples/\w+\.py", text)
    assert programs and all((ROOT / program).exists() for program in programs)


def test_docs_first_pages_install_jax_for_accelerators():
    """JAX alone comes for the CPU, and a run on it would look like one on the accelerator."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra, jax_extra in (("gpu", "jax[cuda13]"), ("tpu", "jax[tpu]")):
        assert any(one.startswith(jax_extra) for one in extras[extra])
        for page in (PAGES[0], FIRST_RUN, ROOT / "docs" / "how-to" / "many-machines.md"):
            assert f"[train,{extra}]" in page.read_text(), called(page)


def test_docs_first_pages_link_to_every_page():
    pages = {called(page).removeprefix("docs/") for page in PAGES[1:]} - {"index.md"}
    for first, prefix in ((ROOT / "README.md", "docs/"), (ROOT / "docs" / "index.md", "")):
        linked = set(re.findall(rf"\]\({prefix}([\w/-]+\.md)\)", first.read_text()))
        assert pages - linked <= {"collectives.md"}, called(first)


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=called)
def test_docs_pictures_are_readable_in_dark_mode(picture):
    """Each has the colours of both; what stands on the paper has one for each, and no paper is left
    white.
    """
    text = picture.read_text()
    assert text.splitlines()[1] == DARK
    paper = next(one for one in xml.etree.ElementTree.fromstring(text) if one.tag.endswith("rect"))
    assert paper.get("fill") == "white" and 'rect[fill="white"]' in DARK
    for colour in {"black", "#555", "#666"} & set(re.findall(r'<text[^>]* fill="([^"]*)"', text)):
        assert f'text[fill="{colour}"]' in DARK
    for colour in {"black", "#ddd"} & set(re.findall(r'stroke="([^"]*)"', text)):
        assert f'[stroke="{colour}"]' in DARK


def test_docs_reference_examples_are_rendered_as_code():
    """Markdown takes `>>>` for three quotes within each other, and runs the lines of an example
    together.
    """
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(str(ROOT / "docs" / "_doctests.py"))
    package = griffe.load("shardlib", search_paths=[str(ROOT)], extensions=extensions)
    examples = 0
    for name in re.findall(
        r"^::: shardlib\.(\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE
    ):
        found = package[name]
        within = [found, *(found.members.values() if found.is_class else ())]
        for text in (one.docstring.value for one in within if one.docstring):
            outside = re.sub(r"(?ms)^ *```pycon\n.*?\n *```$", "", text)
            assert ">>>" not in outside, f"{name}: {outside}"
            assert not re.search(r"[^\n]\n *```pycon", text) and "<BLANKLINE>" not in text
            examples += text.count("```pycon")
    assert examples > 50


def test_docs_links_lead_to_existing_files():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{called(page)} links to {target}"


def test_docs_navigation_lists_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert f" {page.relative_to(ROOT / 'docs')}\n" in navigation


def test_docs_reference_lists_every_public_name():
    listed = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    public = [
        f"{module.__name__}.{name}"
        for module in (
            shardlib,
            shardlib.collectives,
            shardlib.context,
            shardlib.kernels,
            shardlib.lora,
            shardlib.data,
            shardlib.experts,
            shardlib.optimizers,
            shardlib.pipeline,
            shardlib.planning,
            shardlib.testing,
            shardlib.weights,
        )
        for name, value in vars(module).items()
        if not name.startswith("_") and (value is shardlib.rules or not inspect.ismodule(value))
    ]
    assert sorted(listed) == sorted(public)


COMING_FROM = ROOT / "docs/how-to/coming-from.md"


def test_docs_of_other_frameworks_say_what_there_is_here():
    rows = re.findall(r"^\| (.*) \|$", COMING_FROM.read_text().replace("\\|", "OR"), re.MULTILINE)
    cells = [row.split(" | ") for row in rows if " | " in row]
    assert len(cells) > 80
    names = {"sl": shardlib, "optax": optax, "nnx": nnx}
    names["strategy"] = shardlib.Strategy(mesh="data=8", rules=shardlib.rules.data)
    for theirs, ours, *_ in cells:
        fields, code = {}, re.findall(r"`([^`]+)`", ours)
        assert code or "*nothing*" in ours or ours in ("here", "---"), f"{theirs}: {ours}"
        for written in code:
            text = written.replace("OR", "|")
            field, equals, value = text.partition("=")
            if not (equals and field.isidentifier()):
                assert eval(text, dict(names)) is not None, text
                continue
            if field in fields:  # one of several that one may write
                strategy_with(fields)
                fields = {}
            fields[field] = eval(value, dict(names))
        if fields:
            strategy_with(fields)


def strategy_with(fields):
    """The fields make a strategy, on a mesh that has their axes."""
    rules = fields.get("rules", shardlib.rules.data)
    mesh = "data=8"
    if "pipeline" in fields:
        mesh, rules = "stage=2,data=4", rules | shardlib.rules.pipeline
    if any("model" in str(rules[name]) for name in ("mlp", "heads") if rules.says(name)):
        mesh = "data=2,model=4"
    shardlib.Strategy(**{"mesh": mesh, "rules": rules, **fields})
