"""Eight simulated devices for every test, set before JAX starts; with `pytest -m gpu` the GPU that
is there.
"""

import gc
import importlib.metadata
import importlib.util
import os
import re

import pytest

# Marks whose arguments are ids of parameter sets.
_MARKS_OF_PARAMETERS = ("long", "sentinel", "representative")
COMPILERS = {
    "tpu_compiler": ("libtpu", 'pip install -e ".[test]"'),
    "gpu_compiler": ("jax_plugins.xla_cuda13", 'pip install "jax[cuda13]"'),
}


def pytest_configure(config):
    if any("::" in argument for argument in config.args) and config.option.markexpr == "not slow":
        config.option.markexpr = ""  # a test that is asked for by its name is run
    # Traces are many objects that live long, among which Python would look for garbage often.
    gc.set_threshold(200_000, 20, 50)
    # pytest-xdist tells its workers how wide the terminal is; tables would be cut to it.
    os.environ.pop("COLUMNS", None)
    # With libtpu installed and no TPU, do not ask the metadata server for one.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["TPU_LOG_DIR"] = "disabled"
    # It guards one machine's TPUs; several processes may compile at once.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    if _for_gpu(config):
        # Several processes share its memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Machine code for simulated devices is made in a third of the time where nobody thinks long
    # about it; programs are as ever.
    os.environ["XLA_FLAGS"] = " ".join(
        [
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            # Each test process has a core: parts of a program in threads of their own are no gain.
            "--xla_cpu_parallel_codegen_split_count=1",
            # Unknown later.
            *["--xla_cpu_use_fusion_emitters=false"]
            * importlib.metadata.version("jaxlib").startswith("0.10."),
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=8",
        ]
    )
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # compile for GPUs, do not look for any


def _for_gpu(config):
    return config.option.markexpr == "gpu"


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu`, leave out files with no test for GPUs.

    Some of them make meshes of eight devices when they are imported, and a machine may have one.
    """
    if not _for_gpu(config) or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if re.search(r"\bmark\.gpu\b", text) or "kernel_ops" in text:
        return None
    return True


@pytest.hookimpl(tryfirst=True)  # before pytest looks for the marks that were asked for
def pytest_collection_modifyitems(config, items):
    import jax

    gpu = _for_gpu(config) and jax.default_backend() == "gpu"
    for item in items:
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(
                pytest.mark.skip(reason="needs a GPU, and is chosen by `pytest -m gpu`")
            )
        for marker, (module, command) in COMPILERS.items():
            if item.get_closest_marker(marker) and not _installed(module):
                item.add_marker(pytest.mark.skip(reason=f"needs {module}: {command}"))
        if _takes_long(item) and not _marked(item, "sentinel"):
            item.add_marker(pytest.mark.slow)
            if _is_further_case(item):
                item.add_marker(pytest.mark.exhaustive)
    _refuse_unknown_parameters(config, items)


def _takes_long(item):
    compiled = any(item.get_closest_marker(marker) for marker in COMPILERS)
    return compiled or _marked(item, "long")


def _is_further_case(item):
    """Whether a slow test is another case of a claim that is tested by those of a mark's ids."""
    representative = item.get_closest_marker("representative")
    return representative is not None and _parameters(item) not in representative.args


def _marked(item, name):
    """Whether a test bears a mark: one with arguments is for the parameter sets of these ids."""
    mark = item.get_closest_marker(name)
    if mark is None:
        return False
    return not mark.args or _parameters(item) in mark.args


def _parameters(item):
    """The id of a test's parameter set, as pytest prints it between brackets; or nothing."""
    return item.callspec.id if hasattr(item, "callspec") else ""


def _refuse_unknown_parameters(config, items):
    """A mark for a parameter set that is gone would say nothing: it is an error."""
    if any("::" in argument for argument in config.args):
        return  # only some of a test's parameter sets were collected
    known = {}
    for item in items:
        known.setdefault(item.function, set()).add(_parameters(item))
    for function, parameters in known.items():
        for mark in getattr(function, "pytestmark", []):
            named = set(mark.args) if mark.name in _MARKS_OF_PARAMETERS else set()
            unknown = named - parameters
            if unknown:
                raise pytest.UsageError(
                    f"{function.__module__}.{function.__name__} is marked `{mark.name}` for "
                    f"{sorted(unknown)}, and has no such parameters"
                )


def _installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture
def simulators(monkeypatch, capsys):
    """Pallas's simulators of TPUs and GPUs, and no race in what they run."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not hasattr(plgpu, "InterpretGPUParams"):  # public from JAX 0.12, and there before
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        monkeypatch.setattr(plgpu, "InterpretGPUParams", InterpretGPUParams, raising=False)
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out
