"""The processes of a run: joining them, seeing that they are about to do the same, stopping them at
the same step.
"""

import atexit
import contextlib
import errno
import importlib.util
import ipaddress
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import multihost_utils

COORDINATOR = "SHARDLIB_COORDINATOR"
PROCESSES = "SHARDLIB_PROCESSES"
PROCESS = "SHARDLIB_PROCESS"
HEARTBEAT_TIMEOUT = "SHARDLIB_HEARTBEAT_TIMEOUT"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"

_DEFAULT_HEARTBEAT_TIMEOUT = 100  # seconds; JAX's own default
_HEARTBEAT_TIMEOUTS = range(2, 1_000_001)
_SECONDS_TO_RESOLVE = 120  # of a name that a cluster has yet to publish
_SECONDS_TO_LEAVE = 5
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


# The timeout of heartbeats that `initialize_distributed` gave to JAX, once it has: a process joins
# once.
initialized_with: list[int] = []


def initialize_distributed(*, heartbeat_timeout: int | None = None) -> None:
    """Join the other processes of this run, if there are any.

    It is the first line of a script, before any device is touched.

    Processes are found where `python -m shardlib.launch`, `srun`, `mpirun`, a Kubernetes JobSet or
    indexed Job, or a TPU slice started them; a process that is alone stays alone. Anything else
    that starts processes sets three variables in each of them: `SHARDLIB_COORDINATOR`, the host and
    port of process 0; `SHARDLIB_PROCESSES`, how many there are; and `SHARDLIB_PROCESS`, which one
    it is. `SHARDLIB_PROCESSES=1` says that a process is alone, whatever started it.

    Process 0 listens on the address in `SHARDLIB_COORDINATOR` and on no other, unless
    `JAX_COORDINATOR_BIND_ADDRESS` names one.

    - `heartbeat_timeout`: how many seconds the others wait for a process that sends no heartbeat
      (one that is stopped, or whose machine or network is gone) before they end, from 2 on; the
      same on every process. Without it, the variable `SHARDLIB_HEARTBEAT_TIMEOUT` says so, and
      without that it is 100. Heartbeats are sent at half that interval, so the others end between
      half the timeout and the whole of it after a process falls silent.

    >>> initialize_distributed()
    >>> jax.process_count()
    1
    """
    timeout = heartbeat_timeout_of(heartbeat_timeout, os.environ)
    if jax.distributed.is_initialized():
        _check_joined_alike(heartbeat_timeout)
        return
    if (how := how_to_join(os.environ)) is None:
        return
    if "coordinator_bind_address" in how and how["process_id"] == 0:
        _check_bind_address(how["coordinator_bind_address"])
    try:
        jax.distributed.initialize(**how, heartbeat_timeout_seconds=timeout)
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise ValueError(
            "`initialize_distributed` came too late: JAX has looked at this process's devices "
            "already, and would see no others. Call `sl.initialize_distributed()` at the top of "
            "the script, before anything that asks for devices, makes arrays or meshes."
        ) from error
    except ValueError as error:
        # Of a TPU machine nothing but its metadata say whether it is part of a slice, and JAX is
        # the one to ask.
        if how or "coordinator_address" not in str(error):
            raise
        return
    initialized_with.append(timeout)
    _leave_when_failing()


def heartbeat_timeout_of(argument: int | None, environment: Mapping[str, str]) -> int:
    """The timeout of heartbeats in seconds: the argument of `initialize_distributed`, else the
    variable, else JAX's default.

    >>> heartbeat_timeout_of(None, {}), heartbeat_timeout_of(None,
    ...     {HEARTBEAT_TIMEOUT: "30"}), heartbeat_timeout_of(60, {})
    (100, 30, 60)
    """
    if argument is not None:
        said, value = f"`initialize_distributed(heartbeat_timeout={argument!r})`", argument
    elif HEARTBEAT_TIMEOUT in environment:
        text = environment[HEARTBEAT_TIMEOUT]
        said = f"`{HEARTBEAT_TIMEOUT}={text}`"
        value = int(text) if re.fullmatch("[0-9]{1,9}", text) else None
    else:
        return _DEFAULT_HEARTBEAT_TIMEOUT
    if type(value) is not int or value not in _HEARTBEAT_TIMEOUTS:
        raise ValueError(
            f"{said}: after how many seconds without a heartbeat a process is given up, a whole "
            f"number from {_HEARTBEAT_TIMEOUTS[0]} to {_HEARTBEAT_TIMEOUTS[-1]:,}. Without it, it "
            f"is {_DEFAULT_HEARTBEAT_TIMEOUT}."
        )
    return value


def how_to_join(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` needs to be told in such an environment; None where a
    process is alone.

    JAX looks around too, and takes some for a crowd who are alone: a shell inside an allocation, a
    pod of a notebook.

    >>> how_to_join({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"})
    >>> how_to_join({COORDINATOR: "localhost:1234", PROCESSES: "2", PROCESS: "1"})["process_id"]
    1
    """
    if PROCESSES in environment or COORDINATOR in environment:
        return _told(environment)
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return _open_mpi(environment)
    if all(name in environment for name in _SLURM):
        # The shell of an allocation is a step of its own with one task, though SLURM_NTASKS counts
        # the allocation's.
        tasks = int(environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"]))
        return (
            {"num_processes": tasks, "local_device_ids": slurm_gpus(environment)}
            if tasks > 1
            else None
        )
    # JAX has seen TPUs.
    if "TPU_ML_PLATFORM" in environment and "tpu" in (environment.get("JAX_PLATFORMS") or "tpu"):
        return {}
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        _need(
            "kubernetes",
            "This is a pod of an indexed Job, and JAX asks Kubernetes for the others",
            '"jax[k8s]"',
        )
        return {}
    return None


def slurm_gpus(environment: Mapping[str, str]) -> list[int] | None:
    """Which of the GPUs that it sees a SLURM task takes: its share. JAX gives one to each, however
    many there are.

    >>> node = {"SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "4",
    ...     "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    >>> slurm_gpus(node | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    [2, 3]
    >>> slurm_gpus(node | {"SLURM_STEP_TASKS_PER_NODE": "4,2",
    ...     "CUDA_VISIBLE_DEVICES": "2,3"})  # bound by SLURM
    [0, 1]
    """
    needed = (
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
        "SLURM_GPUS_ON_NODE",
        "CUDA_VISIBLE_DEVICES",
    )
    if "JAX_LOCAL_DEVICE_IDS" in environment or not all(environment.get(name) for name in needed):
        return None
    per_node = [
        int(tasks)
        for tasks, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environment["SLURM_STEP_TASKS_PER_NODE"]
        )
        for _ in range(int(times or 1))
    ]
    seen = len(environment["CUDA_VISIBLE_DEVICES"].split(","))
    tasks = per_node[int(environment["SLURM_NODEID"])]
    if seen < int(environment["SLURM_GPUS_ON_NODE"]) or tasks == 1:
        return list(range(seen))
    share, task = seen // tasks, int(environment["SLURM_LOCALID"])
    return list(range(task * share, (task + 1) * share)) or None


class Stop:
    """Whether the run was asked to end. Made by `catch_termination`."""

    def __init__(self) -> None:
        self._asked = False
        self._together = jax.process_count() > 1

    def now(self, step: int) -> bool:
        """Whether to end after this step: asked after every step, on all processes, which get the
        same answer.
        """
        return (
            multihost_utils.reached_preemption_sync_point(step) if self._together else self._asked
        )


@contextlib.contextmanager
def catch_termination() -> Iterator[Stop]:
    """While it lasts, SIGTERM does not end the process but asks it to stop, as schedulers do ahead
    of a time limit.

    Of several processes any may get the signal. JAX catches it from `initialize_distributed` on,
    and finds a step that none has passed.

    >>> with catch_termination() as stop:
    ...     stop.now(0)
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     stop.now(1)
    False
    True
    """
    stop = Stop()
    if stop._together or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(*_: object) -> None:
        stop._asked = True

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield stop
    finally:
        # None: a handler that Python has not set.
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _told(environment: Mapping[str, str]) -> dict[str, Any] | None:
    if environment.get(PROCESSES) == "1":
        return None
    if missing := [name for name in (COORDINATOR, PROCESSES, PROCESS) if not environment.get(name)]:
        raise ValueError(
            f"To join other processes, `{COORDINATOR}` (host:port of process 0), `{PROCESSES}` and "
            f"`{PROCESS}` go together; not set: {', '.join(f'`{name}`' for name in missing)}. "
            "Without the three, a process is alone."
        )
    try:
        count, process = int(environment[PROCESSES]), int(environment[PROCESS])
    except ValueError:
        count, process = 0, 0
    if not 0 <= process < count:
        raise ValueError(
            f"`{PROCESSES}` is a number, and `{PROCESS}` counts from 0 below it; got "
            f"`{environment[PROCESSES]}` and `{environment[PROCESS]}`."
        )
    address = environment[COORDINATOR]
    _check_address(COORDINATOR, address)
    # JAX alone would listen on every interface of the machine, whatever address it is given.
    bind_address = environment.get(BIND_ADDRESS) or address
    _check_address(BIND_ADDRESS, bind_address)
    return {
        "coordinator_address": address,
        "coordinator_bind_address": bind_address,
        "num_processes": count,
        "process_id": process,
        "cluster_detection_method": "deactivate",
    }


def _check_address(variable: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or bare_ipv6 or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"`{variable}={address}`: a host and a port from 1 to 65535, as in `10.0.0.1:1234`, "
            "`node1:1234` or `[fd00::1]:1234`."
        )


def _check_bind_address(address: str) -> None:
    """See that process 0 can listen there, and that other machines can reach it if the name says
    that they are meant to.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    way_out = (
        f"Let `{COORDINATOR}` name process 0 by an address of this machine that the others reach; "
        f"or say where to listen by `{BIND_ADDRESS}`, as in `{BIND_ADDRESS}=[::]:{port}` for every "
        "interface of it."
    )
    found = _resolve(host, int(port), way_out)
    addresses = sorted({str(place[0]) for _, place in found})
    local = all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in addresses)
    if local and not _is_loopback_name(host):
        raise ValueError(
            f"Process 0 is to listen on `{address}`, and `{host}` is {' and '.join(addresses)} on "
            "this machine (look into /etc/hosts), where processes of other machines cannot reach "
            f"it. If all processes are on this machine, write `localhost:{port}`. {way_out}"
        )
    failures = []
    for family, place in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as one:
                # A port that has just been left is free.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(place)
        except OSError as error:
            # Then `[::]` means all that IPv4 has.
            without_ipv6 = host == "::" and error.errno != errno.EADDRINUSE
            if not without_ipv6:
                failures.append(f"{place[0]}: {error.strerror}")
    if len(failures) == len(found):
        raise ValueError(
            f"Process 0 cannot listen on `{address}` ({'; '.join(failures)}). {way_out}"
        )


def _resolve(host: str, port: int, way_out: str) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of a host; of a pod that was just started, its cluster may not know the name
    yet.
    """
    start, said = time.monotonic(), False
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            return [(family, place) for family, _, _, _, place in found]
        except OSError as error:
            if time.monotonic() - start > _SECONDS_TO_RESOLVE:
                raise ValueError(
                    f"Process 0 is to listen on `{host}:{port}`, and for {_SECONDS_TO_RESOLVE} "
                    f"seconds this machine knew no host of that name ({error.strerror}). {way_out}"
                ) from error
            if not said and time.monotonic() - start > 2:
                said = True
                sys.stderr.write(
                    f"shardlib: waiting for `{host}`, process 0, to have an address "
                    f"({error.strerror})\n"
                )
        time.sleep(1)


def _is_loopback_name(host: str) -> bool:
    if host in ("localhost", "ip6-localhost", "ip6-loopback") or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_joined_alike(heartbeat_timeout: int | None) -> None:
    """Refuse another timeout than the one that this process was joined with, which can no longer be
    changed.
    """
    if heartbeat_timeout is None or initialized_with == [heartbeat_timeout]:
        return
    how = (
        f"by `initialize_distributed` with {initialized_with[0]} seconds"
        if initialized_with
        else "by `jax.distributed.initialize`"
    )
    raise ValueError(
        f"`initialize_distributed(heartbeat_timeout={heartbeat_timeout})`: this process was joined "
        f"already, {how}. Give it where it is joined first."
    )


def _open_mpi(environment: Mapping[str, str]) -> dict[str, Any]:
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return {}
    _need(
        "mpi4py", "Since version 5 of Open MPI, JAX asks `mpi4py` for the other processes", "mpi4py"
    )
    return {"cluster_detection_method": "mpi4py"}


def _need(module: str, why: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"{why}; it is not installed. `pip install {package}`; or set `{COORDINATOR}` "
            f"(host:port of process 0), `{PROCESSES}` and `{PROCESS}` in each process; or "
            f"`{PROCESSES}=1`, if each is meant to be alone."
        )


def _leave_when_failing() -> None:
    """See that a process that fails ends: JAX lets it wait five minutes for the others, which wait
    for it to compute.
    """
    leaving, before, code = threading.Event(), sys.excepthook, [1]

    def note(kind: Any, error: Any, trace: Any) -> None:
        before(kind, error, trace)
        code[0] = 128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1
        # Started here, where threads may still start. Nothing happens to a process that goes on, as
        # an interactive one.
        threading.Thread(target=end, daemon=True).start()

    def end() -> None:
        leaving.wait()
        time.sleep(_SECONDS_TO_LEAVE)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code[0])

    sys.excepthook = note
    atexit.register(leaving.set)
