"""The processes of a run: how they find each other, what they compare, when they stop."""

import inspect
import ipaddress
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from shardlib.machine import _processes
from shardlib.machine._agreement import describe_disagreement, require_agreement
from shardlib.machine._processes import (
    catch_termination,
    heartbeat_timeout_of,
    how_to_join,
    initialize_distributed,
)

ROOT = Path(__file__).parent.parent

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
GPUS = {
    "SLURM_GPUS_ON_NODE": "8",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def launch(tmp_path, count, text):
    """Run a script as so many processes; its exit code, and the lines of output without XLA's."""
    path = tmp_path / "script.py"
    path.write_text(text)
    command = [
        sys.executable,
        "-m",
        "shardlib.launch",
        "-n",
        str(count),
        "--devices",
        "1",
        "--",
        sys.executable,
        str(path),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    "environment, how",
    [
        ({}, None),
        ({"SHARDLIB_PROCESSES": "1", **SLURM}, None),
        # A batch script, without srun.
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # the shell of an allocation of four tasks
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, {"num_processes": 4, "local_device_ids": None}),
        (SLURM | GPUS, {"num_processes": 4, "local_device_ids": [4, 5, 6, 7]}),
        (
            SLURM | GPUS | {"JAX_LOCAL_DEVICE_IDS": "0"},
            {"num_processes": 4, "local_device_ids": None},
        ),
        (
            # All that there are, for one.
            SLURM | GPUS | {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "3,1"},
            {"num_processes": 4, "local_device_ids": [0, 1, 2, 3, 4, 5, 6, 7]},
        ),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, {}),
        ({"TPU_ML_PLATFORM": "JAX"}, {}),
        ({"TPU_ML_PLATFORM": "JAX", "JAX_PLATFORMS": "cpu"}, None),
        (POD, None),  # a notebook
    ],
)
def test_distributed_setup_is_detected_from_the_environment(environment, how):
    assert how_to_join(environment) == how


TOLD = {"SHARDLIB_PROCESSES": "2", "SHARDLIB_PROCESS": "0"}


@pytest.mark.parametrize(
    "address, bind",
    [
        ("127.0.0.1:29555", None),
        ("[fd00::1]:1", None),
        ("node1.cluster:65535", None),
        ("10.0.0.1:29555", "0.0.0.0:29555"),
        ("node1:29555", "[::]:29555"),
    ],
)
def test_coordinator_binds_its_address_unless_a_bind_address_is_set(address, bind):
    environment = (
        TOLD
        | {"SHARDLIB_COORDINATOR": address}
        | ({"JAX_COORDINATOR_BIND_ADDRESS": bind} if bind else {})
    )
    how = how_to_join(environment)
    assert how is not None
    assert (how["coordinator_address"], how["coordinator_bind_address"]) == (
        address,
        bind or address,
    )


@pytest.mark.parametrize("variable", ["SHARDLIB_COORDINATOR", "JAX_COORDINATOR_BIND_ADDRESS"])
@pytest.mark.parametrize(
    "address", ["127.0.0.1", ":29555", "host:", "host:x", "host:0", "host:65536", "host:-1", "::1:29555", "host:99999999"]
)  # fmt: skip
def test_coordinator_address_must_be_a_host_and_a_port(variable, address):
    with pytest.raises(ValueError, match=f"`{variable}={re.escape(address)}`: a host and a port"):
        how_to_join(TOLD | {"SHARDLIB_COORDINATOR": "host:1"} | {variable: address})


def names(*addresses):
    """What a resolver would say of any name."""
    return lambda host, port, **_: [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses
    ]


def listen(monkeypatch, coordinator):
    """Join as process 0 of two, but for JAX."""
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda **how: pytest.fail("it was not refused")
    )
    for name, value in (TOLD | {"SHARDLIB_COORDINATOR": coordinator}).items():
        monkeypatch.setenv(name, value)
    initialize_distributed()


def test_coordinator_address_of_another_machine_is_refused(monkeypatch):
    with pytest.raises(
        ValueError, match=r"cannot listen on `192\.0\.2\.1:29555`.*JAX_COORDINATOR_BIND_ADDRESS"
    ):
        listen(monkeypatch, "192.0.2.1:29555")


def test_coordinator_port_in_use_is_refused(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(
            ValueError, match=r"cannot listen on .* \(127\.0\.0\.1: Address already in use\)"
        ):
            listen(monkeypatch, f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("addresses", [("127.0.1.1",), ("127.0.0.1", "127.0.1.1")])
def test_coordinator_name_that_resolves_to_loopback_is_refused(addresses, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", names(*addresses))
    with pytest.raises(
        ValueError, match=r"`node1` is .*127\.0\.1\.1 on this machine .* write `localhost:29555`"
    ):
        listen(monkeypatch, "node1:29555")


def test_coordinator_name_that_does_not_resolve_is_refused(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(_processes, "_SECONDS_TO_RESOLVE", 0)
    with pytest.raises(
        ValueError,
        match=r"`node1:29555`, and .* no host of that name \(Name or service not known\)",
    ):
        listen(monkeypatch, "node1:29555")


def listening(port):
    """The addresses on which anything listens at a port, read from the kernel."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            (host, at), state = line.split()[1].split(":"), line.split()[3]
            if state == "0A" and int(at, 16) == port:
                words = [bytes.fromhex(host[k : k + 8])[::-1] for k in range(0, len(host), 8)]
                address = ipaddress.ip_address(b"".join(words))
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


@pytest.mark.long
@pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="the kernel's table of sockets is read"
)
def test_coordinator_listens_only_on_the_given_host():
    cases = {
        "127.0.0.1": {"127.0.0.1"},
        "localhost": {"127.0.0.1", "::1"},
        "0.0.0.0": {"0.0.0.0", "::"},
    }
    started = []
    try:
        for host, allowed in cases.items():
            with socket.socket() as one:
                one.bind(("127.0.0.1", 0))
                port = one.getsockname()[1]
            environment = (
                os.environ
                | TOLD
                | {"SHARDLIB_COORDINATOR": f"{host}:{port}", "PYTHONPATH": str(ROOT)}
            )
            process = subprocess.Popen(
                [sys.executable, "-c", "import shardlib; shardlib.initialize_distributed()"],
                env=environment,
            )
            started.append((process, port, allowed))
        for process, port, allowed in started:
            end = time.monotonic() + 120
            while not (found := listening(port)):
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            assert found <= allowed
    finally:
        for process, _, _ in started:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "argument, environment, seconds",
    [
        (None, {}, 100),
        (None, {"SHARDLIB_HEARTBEAT_TIMEOUT": "30"}, 30),
        (2, {"SHARDLIB_HEARTBEAT_TIMEOUT": "30"}, 2),
        (1_000_000, {}, 1_000_000),
    ],
)
def test_heartbeat_timeout_is_taken_from_the_argument_or_environment(
    argument, environment, seconds, monkeypatch
):
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **how: given.update(how))
    monkeypatch.setattr(_processes, "_leave_when_failing", lambda: None)
    monkeypatch.setattr(_processes, "initialized_with", [])
    for name, value in (
        TOLD | environment | {"SHARDLIB_COORDINATOR": "host:1", "SHARDLIB_PROCESS": "1"}
    ).items():
        monkeypatch.setenv(name, value)
    initialize_distributed(heartbeat_timeout=argument)
    assert given["heartbeat_timeout_seconds"] == seconds
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    initialize_distributed()
    initialize_distributed(heartbeat_timeout=seconds)
    with pytest.raises(
        ValueError, match=f"joined already, by `initialize_distributed` with {seconds} seconds"
    ):
        initialize_distributed(heartbeat_timeout=seconds + 1 if seconds < 1_000_000 else 5)


def test_heartbeat_timeout_defaults_to_that_of_jax():
    default = (
        inspect.signature(jax.distributed.initialize)
        .parameters["heartbeat_timeout_seconds"]
        .default
    )
    assert heartbeat_timeout_of(None, {}) == default
    assert f"without that it is {default}" in " ".join(
        (initialize_distributed.__doc__ or "").split()
    )


@pytest.mark.parametrize(
    "seconds", [0, 1, -5, 1_000_001, 2**40, 30.0, "30", True, float("nan"), None]
)
def test_heartbeat_timeout_refuses_invalid_seconds(seconds, monkeypatch):
    if seconds is not None:
        with pytest.raises(
            ValueError,
            match=re.escape(f"`initialize_distributed(heartbeat_timeout={seconds!r})`: "),
        ):
            initialize_distributed(heartbeat_timeout=seconds)
    if not isinstance(seconds, str):
        text = "" if seconds is None else str(seconds)
        monkeypatch.setenv("SHARDLIB_HEARTBEAT_TIMEOUT", text)
        with pytest.raises(
            ValueError,
            match=re.escape(f"`SHARDLIB_HEARTBEAT_TIMEOUT={text}`: after how many seconds"),
        ):
            initialize_distributed()


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"SHARDLIB_COORDINATOR": "host:1"}, "not set: `SHARDLIB_PROCESSES`, `SHARDLIB_PROCESS`"),
        (
            {"SHARDLIB_COORDINATOR": "host:1", "SHARDLIB_PROCESSES": "2", "SHARDLIB_PROCESS": "2"},
            "counts from 0 below it; got `2` and `2`",
        ),
        (POD | {"JOB_COMPLETION_INDEX": "0"}, r'pip install "jax\[k8s\]"'),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "pip install mpi4py"),
    ],
)
def test_distributed_setup_names_missing_variables_and_packages(environment, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        how_to_join(environment)


def test_initialize_distributed_after_jax_started_is_refused(monkeypatch):
    jax.devices()
    for name, value in {"COORDINATOR": "localhost:1", "PROCESSES": "2", "PROCESS": "0"}.items():
        monkeypatch.setenv(f"SHARDLIB_{name}", value)
    with pytest.raises(
        ValueError, match="`initialize_distributed` came too late.*at the top of the script"
    ):
        initialize_distributed()


def test_single_process_run_agrees_with_itself_and_catches_sigterm():
    initialize_distributed()
    require_agreement({"configuration": "anything"})
    before = signal.getsignal(signal.SIGTERM)
    with catch_termination() as stop:
        assert not stop.now(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.now(1) and stop.now(2)
    assert signal.getsignal(signal.SIGTERM) == before


def test_catch_termination_does_nothing_off_the_main_thread():
    before, found = signal.getsignal(signal.SIGTERM), []

    def work():
        with catch_termination() as stop:
            found.extend([signal.getsignal(signal.SIGTERM), stop.now(0)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before, False]


def test_disagreement_of_many_processes_is_described_briefly():
    usual = {"a": "same", "b": "\n".join(map(str, range(1000)))}
    others = [([k], usual | {"b": f"{k}\n" * 1000}) for k in range(3)]
    told = describe_disagreement([(range(10, 500), usual), *others], unheard=[*range(3, 10)])
    assert told.startswith("Process 0 differs from processes 10-499 in `b`; process 1 differs")
    assert "processes 3-9 differ from all of these" in told and "more lines" in told
    assert len(told.splitlines()) < 80 and "`a`" not in told


@pytest.mark.long
def test_disagreement_names_the_odd_process_of_three_on_every_process(tmp_path):
    code, out, shown = launch(
        tmp_path,
        3,
        """
import os
import shardlib as sl
odd = os.environ["SHARDLIB_PROCESS"] == "1"
sl.initialize_distributed(heartbeat_timeout=90 if odd else None)
from shardlib.machine import _processes
from shardlib.machine._agreement import require_agreement
try:
    require_agreement({"configuration": "the same"})
except ValueError as error:
    print(error)
_processes.initialized_with[:] = [100]
require_agreement({"configuration": "the same"})
require_agreement({"configuration": "the same", "batch": f"tokens: int32[8, {64 if odd else 128}]\\nmask: bool[8]"})
""",
    )
    assert code == 1
    for process in range(3):
        assert f"[{process}] Process 1 differs from processes 0, 2 in `heartbeat_timeout`." in out
        mine = [line[4:] for line in shown.splitlines() if line.startswith(f"[{process}] ")]
        at = next(k for k, line in enumerate(mine) if line.startswith("ValueError: "))
        assert mine[at].startswith("ValueError: Process 1 differs from processes 0, 2 in `batch`.")
        assert {"-tokens: int32[8, 128]", "+tokens: int32[8, 64]", " mask: bool[8]"} <= set(
            mine[at + 1 :]
        )


@pytest.mark.long
def test_termination_of_one_process_stops_both_and_so_does_a_failure(tmp_path):
    code, out, error = launch(
        tmp_path,
        2,
        """
import shardlib as sl
sl.initialize_distributed()
import os, signal, time
import jax, numpy as np
from jax.experimental.multihost_utils import process_allgather
from shardlib.machine._processes import catch_termination
first = jax.process_index() == 0
with catch_termination() as stop:
    for step in range(10_000):
        time.sleep(0.02 if first else 0.01)
        process_allgather(np.ones(1))
        if step == 3 and not first:
            os.kill(os.getpid(), signal.SIGTERM)
        if stop.now(step):
            print("stopped after", step)
            break
if not first:
    raise RuntimeError("the checkpoint is full")
process_allgather(np.ones(1))
""",
    )
    assert code == 1
    stopped = dict(re.findall(r"\[(\d)\] stopped after (\d+)", out))
    assert set(stopped) == {"0", "1"} and stopped["0"] == stopped["1"]
    assert "process 1 died with exit code 1:\n    Traceback" in error
    assert error.endswith("RuntimeError: the checkpoint is full\n")


@pytest.mark.long
def test_processes_with_unequal_device_counts_are_named(tmp_path):
    code, _, error = launch(
        tmp_path,
        3,
        """
import os
if os.environ["SHARDLIB_PROCESS"] == "2":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import shardlib as sl
sl.initialize_distributed()
from shardlib.machine._agreement import require_agreement
require_agreement({})
""",
    )
    assert code == 1
    assert (
        "ValueError: Processes have different numbers of devices: process 2 has 2; processes 0-1 "
        "have 1." in error
    )
