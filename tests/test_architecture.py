"""The architecture: who may import whom, what `import shardlib` costs, and docstrings that are true."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardlib"

# Folders and files, the lowest first. Each may import those before it, and nothing after: a total
# order, so there are no cycles. A folder comes after its files.
LAYERS = [
    ("", "_version _text _progress _user_files _notebook _tree _lock"),
    ("checks", "_arguments _arrays"),
    (
        "machine",
        "_absent _device_grid _mesh _torus _portable_mesh _describe_mesh _chips _processes _agreement",
    ),
    ("machine", "_target_names _targets"),
    (
        "compiled",
        "_source_lines _kernel_products _runs _name_stacks _hlo _device_groups _collectives",
    ),
    (
        "compiled",
        "_memory_traffic _flops _written _compile _flow _memory _host_copies",
    ),
    (
        "data",
        "_packages _checks _blocks _alphabet _tokenizer _chat _corpus _documents _files _tokens _seals",
    ),
    ("data", "_claim _build _store _sequences"),
    ("layouts", "_specs _rules"),
    ("", "rules"),
    (
        "layouts",
        "_resolve _relate _placement _flax_rules _host _chain_schedules _remat_parts _remat_policy _remat_text "
        "_checkpoint_policies _annotate _sequence_order _route _reshard",
    ),
    (
        "tracing",
        "_jaxpr _row_rules _rows _flops _row_gradients _lookup_forms _lookups _linearize _device_bytes "
        "_activation_codecs _compressed_saves _sign_checks "
        "_block_paths _block_places _manual_axes _block_costs _block_activations _layer_policies _copied_ahead _layer_runs _chain_scan _chain_loops _reduced_sums _region",
    ),
    ("tracing", "_layer_uses _weight_values _bound_weights _stored_weights"),
    ("modeling", "_remat _random _batch _flax _naming _flax_names _layers"),
    ("kernels", "_rows _shards _choice _tpu _gpu _gpu_rows _gpu_ring _gpu_tiles _tokamax"),
    ("kernels._softmax", "_reference _tpu _gpu"),
    ("kernels._norm", "_reference _tpu _gpu _tokamax"),
    ("kernels._linear_cross_entropy", "_reference _tpu_blocks _tpu _gpu"),
    (
        "kernels._attention",
        "_mask _patterns _pairs _reference _merged _tpu_blocks _tpu_pattern _tpu_grid _tpu_kernels _tpu",
    ),
    (
        "kernels._attention",
        "_gpu_band _gpu_walk _gpu_rows _gpu_kernels _gpu _cudnn _tokamax _options",
    ),
    (
        "kernels._attention",
        "_layouts _ring _ring_passes _ulysses",
    ),
    ("kernels", "_activations _rotary _projections _softmax _norm _linear_cross_entropy"),
    ("kernels._grouped_matmul", "_places _reference _ragged_dot _tpu _gpu_staging _gpu"),
    ("kernels", "_grouped_matmul _attention _on_shards _tiles"),
    (
        "collectives",
        "_sums _codecs _compressed _compressed_shards _exact _exchanges _zero _zero_split _zero_shards",
    ),
    ("collectives", "_worker_sums _feedback _low_rank _largest _fragments _meetings _server"),
    (
        "optimizers",
        "_local _stacked _delayed _moments _hyperparameters _onebit_adam _onebit_lamb _zero_one_adam _rounds",
    ),
    (
        "pipeline.schedules",
        "_table _simulate _weave _search _rounds _schedule _v_shaped _published",
    ),
    ("pipeline.schedules", "_draw _command"),
    (
        "pipeline",
        "schedules _program _schedule_checks _loop _wire _cut_checks _cut_loss _cut _layer _buffers",
    ),
    ("pipeline", "_parts _sweeps _pass_row _passes _outside_loops"),
    ("pipeline", "_execute"),
    ("experts", "_selection _routing _sigmoid_router _noisy_router _hash_router _expert_choice"),
    (
        "experts",
        "_bias _gate _choose _row_moves _dispatch _moe_checks _moe_stats _token_exchange _moe",
    ),
    ("experts", "_rows _rows_sent _further_rounds _row_rounds _two_levels _dropless _load_picture"),
    (
        "step",
        "_scopes _precision _offload _gradient_sizes _exchange _exchange_checks _strategy_checks _strategy "
        "_batches _layer_order _workers _first_optimizer_state _state _optimizer_call _layer_places _init_checks _init",
    ),
    (
        "step",
        "_error_forms _saved_workers _saved_errors _saved_model _describe _varying _reassigned _examples _example_rules _example_moves _coupled",
    ),
    (
        "step",
        "_promoted_products _adapted _weights _microbatches _loss _loss_trace _remat_checks _loss_checks _pipelined",
    ),
    (
        "step",
        "_remat_budget _gradient _host_update _streamed_loops _streamed_update _optimizer_update _step_calls "
        "_compiler_options _meeting _meeting_meanwhile _apart _server _step _evaluation",
    ),
    ("train", "_contents _folder _checkpoint_failures _checkpoint_folders _checkpoint_reading"),
    ("train", "_checkpoint _nonfinite _sinks _recorder _speed _loop_options _run_steps _run _loop"),
    (
        "planning",
        "_break_even _decoder _decoder_names _estimate _lower _machine _flops _prices _activations "
        "_activations_report _advice _compiled_step _frontier_picture _frontier "
        "_microbatch _remat_advice _report _plan _questions _command _context_costs",
    ),
    ("", "context"),
    ("lora", "_adapter _add"),
    ("weights", "_hub _tensor_files _table _load _save _convert _command"),
    ("", "__main__ launch"),
    ("testing", "_traces _assert _oracle _compare"),
]


def in_order():
    """The names of all modules, the lowest first; a folder with no files left comes after them."""
    last = {folder: number for number, (folder, _) in enumerate(LAYERS)}
    for number, (folder, names) in enumerate(LAYERS):
        for name in names.split():
            yield f"{folder}.{name}".removeprefix(".")
        if (
            last[folder] == number
            and folder
            and "._" not in folder
            and folder != "pipeline.schedules"
        ):
            yield folder


ORDER = list(in_order())

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")
)
ALLOWED = {
    "flax": {
        "layouts._flax_rules",
        *(f"modeling.{name}" for name in ("_flax", "_naming", "_flax_names", "_layers")),
        *("lora._adapter", "lora._add"),
    },
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
def test_imports_of_a_module_reach_only_lower_layers(module):
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


def test_package_init_only_reexports():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assert all(isinstance(node, ast.ImportFrom) for node in tree.body[1:])


def test_import_of_shardlib_loads_no_heavy_packages():
    heavy = ("orbax", "grain", "tensorstore", "chex", "hypothesis")
    code = f"import sys, shardlib; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "[]"


def test_import_of_shardlib_changes_no_config_or_environment():
    code = (
        "import jax; a = dict(jax.config.values); import os; e = dict(os.environ); import "
        "shardlib; print(a == dict(jax.config.values) and e == dict(os.environ))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "True"


@pytest.mark.long("experts._dropless")
@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_pass(module):
    name = ".".join(["shardlib", *room(module).split(".")]).rstrip(".")
    result = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE
    )
    assert result.failed == 0


def test_public_names_all_carry_a_docstring():
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
