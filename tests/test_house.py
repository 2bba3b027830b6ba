"""The house: who may import whom, what `import shardlib` costs, and docstrings that are true."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardlib"

# Each room may import the rooms above it, and nothing below: a total order, so there are no cycles.
ORDER = [
    *(
        "_text",
        "_arguments",
        "_arrays",
        "_tree",
        "_lock",
        "_mesh",
        "_describe_mesh",
        "_chips",
        "_processes",
        "_agreement",
        "_hlo",
        "_traffic",
        "_memory_traffic",
    ),
    *(f"data.{name}" for name in ("_packages", "_checks", "_blocks", "_tokenizer", "_corpus")),
    *(f"data.{name}" for name in ("_documents", "_files", "_tokens", "_seals")),
    *(f"data.{name}" for name in ("_progress", "_claim", "_build", "_store", "_sequences")),
    "data",
    *(
        "_rules",
        "rules",
        "_relate",
        "_placement",
        "_flax_rules",
        "_annotate",
        "_route",
        "_reshard",
        "_jaxpr",
        "_row_gradients",
        "_lookups",
        "_region",
        "_stored_weights",
        "_remat",
    ),
    *("_random", "_batch", "_flax", "_flax_names", "_layers", "_precision"),
    *(
        f"kernels.{name}"
        for name in ("_rows", "_shards", "_choice", "_tpu", "_gpu", "_gpu_rows", "_gpu_tiles")
    ),
    *(
        f"kernels.{op}{name}"
        for op in ("_softmax", "_norm", "_linear_cross_entropy")
        for name in ("._reference", "._tpu", "._gpu", *["._tokamax"] * (op == "_norm"), "")
    ),
    "kernels",
    *(
        f"collectives.{name}"
        for name in ("_sums", "_codecs", "_compressed", "_exact", "_exchanges")
    ),
    *("collectives", "_zero"),
    *("optimizers._stacked", "optimizers._local", "optimizers._onebit_adam", "optimizers"),
    *(
        f"pipeline.{name}"
        for name in (
            "_table",
            "_simulate",
            "_search",
            "_rounds",
            "_weave",
            "_schedule",
            "_schedules",
        )
    ),
    *(
        f"pipeline.{name}"
        for name in ("_program", "_loop", "_cut", "_layer", "_execute", "_draw", "_command")
    ),
    "pipeline",
    *("experts._routing", "experts._dispatch", "experts._moe", "experts"),
    *(
        f"train.{name}"
        for name in (
            "_exchange",
            "_strategy",
            "_batches",
            "_layer_order",
            "_state",
            "_init_checks",
            "_init",
            "_errors",
            "_describe",
            "_varying",
            "_examples",
            "_example_rules",
            "_coupled",
            "_promoted_products",
            "_adapted",
            "_weights",
            "_loss",
            "_loss_checks",
            "_pipelined",
            "_optimizer_update",
            "_step_calls",
            "_step",
        )
    ),
    *(f"train.{name}" for name in ("_evaluate", "_contents", "_folder", "_checkpoint_failures")),
    *(
        f"train.{name}"
        for name in ("_checkpoint", "_nonfinite", "_sinks", "_speed", "_loop_options", "_loop")
    ),
    "train",
    *(
        f"planning.{name}"
        for name in (
            "_targets",
            "_break_even",
            "_estimate",
            "_compile",
            "_flow",
            "_memory",
            "_prices",
            "_report",
            "_plan",
        )
    ),
    *("planning._command", "planning", "__main__", "launch"),
    *("testing._traces", "testing._assert", "testing._compare", "testing"),
]

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
)
ALLOWED = {
    "flax": {"_flax_rules", "_flax", "_flax_names", "_layers"},
    "orbax": {"train._checkpoint"},
    "chex": set(),
}


def imports(module):
    """Every import of a module, as (line, dotted name)."""
    for node in ast.walk(ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def room(name):
    return name.removesuffix(".__init__").removesuffix("__init__")


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_imports_go_up(module):
    here = ORDER.index(room(module))
    for line, name in imports(module):
        parts = name.split(".")
        if parts[0] == "shardlib":
            target = next(
                r for r in (".".join(parts[1:k]) for k in range(len(parts), 0, -1)) if r in ORDER
            )
            assert ORDER.index(target) < here, (
                f"shardlib/{module}:{line} imports {name}, which lies below it"
            )
        assert not name.startswith("jax._src"), (
            f"shardlib/{module}:{line} imports {name}, which is private"
        )
        assert module in ALLOWED.get(parts[0], {module}), f"shardlib/{module}:{line} imports {name}"
        assert parts[0] not in ("models", "examples", "tests", "benchmarks"), (
            f"shardlib/{module}:{line} imports {name}"
        )


def test_the_surface_is_reexports_alone():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assert all(isinstance(node, ast.ImportFrom) for node in tree.body[1:])


def test_import_loads_what_annotations_need_and_no_more():
    heavy = ("orbax", "grain", "tensorstore", "chex", "hypothesis")
    code = f"import sys, shardlib; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "[]"


def test_import_sets_nothing():
    code = (
        "import jax; a = dict(jax.config.values); import os; e = dict(os.environ); import "
        "shardlib; print(a == dict(jax.config.values) and e == dict(os.environ))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "True"


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    name = ".".join(["shardlib", *room(module).split(".")]).rstrip(".")
    result = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


def test_every_public_name_is_documented_by_an_example_or_a_docstring():
    import shardlib
    import shardlib.data
    import shardlib.testing

    public = [
        getattr(m, n)
        for m in (shardlib, shardlib.data, shardlib.testing)
        for n in vars(m)
        if not n.startswith("_")
    ]
    assert [thing for thing in public if not (thing.__doc__ or "").strip()] == []
