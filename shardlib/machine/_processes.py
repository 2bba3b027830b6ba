"""The processes of a run: joining them, and stopping them after the same step.

Who starts processes tells each of them in environment variables, of its own names, where the others
are. `how_to_join` reads these; JAX then connects each process to process 0, which listens on an
address that all must reach. From then on every process sends heartbeats, and if one falls silent
the others end.
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

from shardlib._progress import say

COORDINATOR = "SHARDLIB_COORDINATOR"
PROCESSES = "SHARDLIB_PROCESSES"
PROCESS = "SHARDLIB_PROCESS"
HEARTBEAT_TIMEOUT = "SHARDLIB_HEARTBEAT_TIMEOUT"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"

_DEFAULT_HEARTBEAT_TIMEOUT = 100  # seconds; JAX's own default
_HEARTBEAT_TIMEOUTS = range(2, 1_000_001)
_SECONDS_TO_RESOLVE = 120  # of a name that a cluster has yet to publish
_SECONDS_TO_LEAVE = 5  # from the end of a script that failed
_SLURM_GPUS = (
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NODEID",
    "SLURM_GPUS_ON_NODE",
    "CUDA_VISIBLE_DEVICES",
)
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
    how = how_to_join(os.environ)
    if how is None:
        return
    if "coordinator_bind_address" in how and how["process_id"] == 0:
        _check_bind_address(how["coordinator_bind_address"])
    try:
        jax.distributed.initialize(**how, heartbeat_timeout_seconds=timeout)
    # JAX has no kinds of errors of its own for these, so their texts tell them apart.
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise ValueError(
            "`initialize_distributed` came too late: JAX has looked at this process's devices "
            "already, and would see no others. Call `sl.initialize_distributed()` at the top of "
            "the script, before anything that asks for devices, makes arrays or meshes."
        ) from error
    except ValueError as error:
        # Nothing but the metadata of a TPU machine say whether it is part of a slice, and only JAX
        # reads them. If it finds no coordinator, the machine is alone.
        if how or "coordinator_address" not in str(error):
            raise
        return
    initialized_with.append(timeout)
    _leave_when_failing()


def heartbeat_timeout_of(argument: int | None, environment: Mapping[str, str]) -> int:
    """The timeout of heartbeats, in seconds.

    It is the argument of `initialize_distributed`, else the variable, else JAX's default.

    >>> heartbeat_timeout_of(None, {}), heartbeat_timeout_of(None,
    ...     {HEARTBEAT_TIMEOUT: "30"}), heartbeat_timeout_of(60, {})
    (100, 30, 60)
    """
    if argument is not None:
        source = f"`initialize_distributed(heartbeat_timeout={argument!r})`"
        value = argument
    elif HEARTBEAT_TIMEOUT in environment:
        text = environment[HEARTBEAT_TIMEOUT]
        source = f"`{HEARTBEAT_TIMEOUT}={text}`"
        value = int(text) if re.fullmatch("[0-9]{1,9}", text) else None
    else:
        return _DEFAULT_HEARTBEAT_TIMEOUT
    # `type` and not `isinstance`: True is an int too.
    if type(value) is not int or value not in _HEARTBEAT_TIMEOUTS:
        raise ValueError(
            f"{source}: after how many seconds without a heartbeat a process is given up, a whole "
            f"number from {_HEARTBEAT_TIMEOUTS[0]} to {_HEARTBEAT_TIMEOUTS[-1]:,}. Without it, it "
            f"is {_DEFAULT_HEARTBEAT_TIMEOUT}."
        )
    return value


def how_to_join(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """What `jax.distributed.initialize` needs to be told in such an environment.

    None means that a process is alone, and an empty dict that JAX finds the others by itself. JAX
    looks around too, and takes some for a crowd who are alone: a shell inside an allocation, a pod
    of a notebook.

    >>> how_to_join({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"})
    >>> how_to_join({COORDINATOR: "localhost:1234", PROCESSES: "2", PROCESS: "1"})["process_id"]
    1
    """
    # What a user says comes before what can be guessed.
    if PROCESSES in environment or COORDINATOR in environment:
        return _by_our_variables(environment)
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return _by_open_mpi(environment)
    if all(name in environment for name in _SLURM):
        return _by_slurm(environment)
    # JAX has seen TPUs, and asks their metadata for the other hosts of the slice.
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


def _by_slurm(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """How a task of a SLURM step joins the others; None for a step of one task."""
    # The shell of an allocation is a step of its own with one task, though SLURM_NTASKS counts the
    # allocation's.
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"]))
    if tasks <= 1:
        return None
    return {"num_processes": tasks, "local_device_ids": slurm_gpus(environment)}


def slurm_gpus(environment: Mapping[str, str]) -> list[int] | None:
    """Which of the GPUs that it sees a SLURM task takes: its share.

    JAX gives one to each task, however many there are. None leaves that to JAX, where SLURM does
    not say what is needed or where there are fewer GPUs than tasks.

    >>> node = {"SLURM_NODEID": "1", "SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "4",
    ...     "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    >>> slurm_gpus(node | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    [2, 3]
    >>> slurm_gpus(node | {"SLURM_STEP_TASKS_PER_NODE": "4,2",
    ...     "CUDA_VISIBLE_DEVICES": "2,3"})  # bound by SLURM
    [0, 1]
    """
    if "JAX_LOCAL_DEVICE_IDS" in environment:  # the user says which
        return None
    if not all(environment.get(name) for name in _SLURM_GPUS):
        return None
    visible = len(environment["CUDA_VISIBLE_DEVICES"].split(","))
    tasks_by_node = _expand_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    tasks = tasks_by_node[int(environment["SLURM_NODEID"])]
    # A task that does not see all GPUs of its node has been given its own by SLURM.
    if visible < int(environment["SLURM_GPUS_ON_NODE"]) or tasks == 1:
        return list(range(visible))
    # The tasks of a node share its GPUs evenly, in their order.
    share, task = visible // tasks, int(environment["SLURM_LOCALID"])
    return list(range(task * share, (task + 1) * share)) or None


def _expand_tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, from SLURM's short form: `4,2(x2)` is 4, 2 and 2."""
    tasks_by_node: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks_by_node.extend([int(tasks)] * int(times or 1))
    return tasks_by_node


class Stop:
    """Whether the run was asked to end. Made by `catch_termination`.

    Of several processes JAX keeps the answer, so that all stop after the same step; a process that
    is alone keeps it here.
    """

    def __init__(self) -> None:
        self._requested = False
        self._has_peers = jax.process_count() > 1

    def now(self, step: int) -> bool:
        """Whether to end after this step.

        To be called after every step, on all processes, which get the same answer.
        """
        if self._has_peers:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._requested


@contextlib.contextmanager
def catch_termination() -> Iterator[Stop]:
    """While it lasts, SIGTERM does not end the process but asks it to stop.

    Schedulers send it ahead of a time limit. Of several processes any may get the signal. JAX
    catches it from `initialize_distributed` on, and finds a step that none has passed.

    >>> with catch_termination() as stop:
    ...     stop.now(0)
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     stop.now(1)
    False
    True
    """
    stop = Stop()
    # Of several processes, JAX's own handler does it. And Python lets no thread but the main one
    # set handlers.
    if stop._has_peers or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request_stop(*_: object) -> None:
        stop._requested = True

    previous = signal.signal(signal.SIGTERM, request_stop)
    try:
        yield stop
    finally:
        # None: a handler that Python has not set.
        signal.signal(signal.SIGTERM, previous or signal.SIG_DFL)


def _by_our_variables(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """How a process joins the others as the variables of this library say, which are checked.

    None where they say that it is alone. JAX is kept from looking around for itself.
    """
    if environment.get(PROCESSES) == "1":
        return None
    names = (COORDINATOR, PROCESSES, PROCESS)
    missing = [f"`{name}`" for name in names if not environment.get(name)]
    if missing:
        raise ValueError(
            f"To join other processes, `{COORDINATOR}` (host:port of process 0), `{PROCESSES}` and "
            f"`{PROCESS}` go together; not set: {', '.join(missing)}. "
            "Without the three, a process is alone."
        )
    try:
        count, process = int(environment[PROCESSES]), int(environment[PROCESS])
    except ValueError:
        count, process = 0, 0  # which is refused
    if not 0 <= process < count:
        raise ValueError(
            f"`{PROCESSES}` is a number, and `{PROCESS}` counts from 0 below it; got "
            f"`{environment[PROCESSES]}` and `{environment[PROCESS]}`."
        )
    address = environment[COORDINATOR]
    _check_address(COORDINATOR, address)
    # JAX itself would listen on every interface of the machine, whatever address it is given.
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
    """Refuse what is no `host:port`; an IPv6 address must be in brackets."""
    host, _, port = address.rpartition(":")
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    is_port = re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 1 << 16
    if not host or bare_ipv6 or not is_port:
        raise ValueError(
            f"`{variable}={address}`: a host and a port from 1 to 65535, as in `10.0.0.1:1234`, "
            "`node1:1234` or `[fd00::1]:1234`."
        )


def _check_bind_address(address: str) -> None:
    """See that process 0 can listen there, and that other machines can reach it.

    An address of this machine only is refused unless its name says so, as `localhost` does: on many
    machines /etc/hosts maps the machine's own name to 127.0.1.1.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    way_out = (
        f"Let `{COORDINATOR}` name process 0 by an address of this machine that the others reach; "
        f"or say where to listen by `{BIND_ADDRESS}`, as in `{BIND_ADDRESS}=[::]:{port}` for every "
        "interface of it."
    )
    socket_addresses = _resolve(host, int(port), way_out)
    hosts = sorted({str(sockaddr[0]) for _, sockaddr in socket_addresses})
    # The loopback is reached from this machine only, which is meant where it is named.
    if all(map(_is_loopback, hosts)) and not _is_loopback_name(host):
        raise ValueError(
            f"Process 0 is to listen on `{address}`, and `{host}` is {' and '.join(hosts)} on "
            "this machine (look into /etc/hosts), where processes of other machines cannot reach "
            f"it. If all processes are on this machine, write `localhost:{port}`. {way_out}"
        )
    failures = _bind_failures(host, socket_addresses)
    # One address of several is enough.
    if len(failures) == len(socket_addresses):
        raise ValueError(
            f"Process 0 cannot listen on `{address}` ({'; '.join(failures)}). {way_out}"
        )


def _is_loopback(address: str) -> bool:
    """Whether an IP address is one that only this machine reaches; a zone `%eth0` may follow it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _bind_failures(
    host: str, socket_addresses: list[tuple[socket.AddressFamily, Any]]
) -> list[str]:
    """Which of the addresses of a host cannot be listened on, each with the reason."""
    failures = []
    for family, sockaddr in socket_addresses:
        error = _bind_error(family, sockaddr)
        # On a machine without IPv6, `[::]` means all that IPv4 has.
        lacks_ipv6 = error and host == "::" and error.errno != errno.EADDRINUSE
        if error and not lacks_ipv6:
            failures.append(f"{sockaddr[0]}: {error.strerror}")
    return failures


def _bind_error(family: socket.AddressFamily, sockaddr: Any) -> OSError | None:
    """The error of listening on an address; None if it works. The port is free again afterwards."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # A port that has just been left is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(sockaddr)
    except OSError as error:
        return error
    return None


def _resolve(host: str, port: int, way_out: str) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of a host: for each, its family, and what sockets of that family bind to.

    The cluster may not know the name of a pod that has just been started. So it is asked for once a
    second, for two minutes; after two seconds a line on standard error says what it waits for.
    """
    start = time.monotonic()
    is_announced = False
    while True:
        try:
            return _socket_addresses(host, port)
        except OSError as error:
            waited = time.monotonic() - start
            if waited > _SECONDS_TO_RESOLVE:
                raise ValueError(
                    f"Process 0 is to listen on `{host}:{port}`, and for {_SECONDS_TO_RESOLVE} "
                    f"seconds this machine knew no host of that name ({error.strerror}). {way_out}"
                ) from error
            # Names of pods often appear a second after the pods: not worth a word.
            if not is_announced and waited > 2:
                is_announced = True
                reason = f"process 0, to have an address ({error.strerror})"
                say(f"waiting for `{host}`, {reason}")
        time.sleep(1)


def _socket_addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses at which to listen for a host, with the family of each."""
    found: list[tuple[socket.AddressFamily, Any]] = []
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in infos:
        found.append((family, address))
    return found


def _is_loopback_name(host: str) -> bool:
    """Whether a name or an address says by itself that it means this machine only."""
    if host in ("localhost", "ip6-localhost", "ip6-loopback") or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_joined_alike(heartbeat_timeout: int | None) -> None:
    """Refuse another timeout than the one that this process was joined with.

    JAX cannot change it any more. Without a timeout, joining twice is allowed.
    """
    if heartbeat_timeout is None or initialized_with == [heartbeat_timeout]:
        return
    how = "by `jax.distributed.initialize`"
    if initialized_with:
        how = f"by `initialize_distributed` with {initialized_with[0]} seconds"
    raise ValueError(
        f"`initialize_distributed(heartbeat_timeout={heartbeat_timeout})`: this process was joined "
        f"already, {how}. Give it where it is joined first."
    )


def _by_open_mpi(environment: Mapping[str, str]) -> dict[str, Any]:
    """How a process that `mpirun` started joins the others.

    Up to version 4, Open MPI sets a variable with an address, which is enough for JAX.
    """
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return {}
    _need(
        "mpi4py", "Since version 5 of Open MPI, JAX asks `mpi4py` for the other processes", "mpi4py"
    )
    return {"cluster_detection_method": "mpi4py"}


def _need(module: str, why: str, package: str) -> None:
    """Refuse to go on without a module that JAX needs to find the other processes."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"{why}; it is not installed. `pip install {package}`; or set `{COORDINATOR}` "
            f"(host:port of process 0), `{PROCESSES}` and `{PROCESS}` in each process; or "
            f"`{PROCESSES}=1`, if each is meant to be alone."
        )


def _leave_when_failing() -> None:
    """See that a process ends after an error that nobody catches.

    Without it, JAX lets such a process wait five minutes at exit for the others, and these wait for
    it to compute. So when the interpreter shuts down after an error, a thread waits a few seconds
    for that to finish by itself, and then ends the process with the exit code of the error.
    """
    shutting_down = threading.Event()
    previous_hook = sys.excepthook
    exit_code = [1]

    def note_error(kind: Any, error: Any, trace: Any) -> None:
        previous_hook(kind, error, trace)
        exit_code[0] = 128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1
        # Started here, where threads may still start. Nothing happens to a process that goes on, as
        # an interactive one.
        threading.Thread(target=end_process, daemon=True).start()

    def end_process() -> None:
        shutting_down.wait()
        # An exit that needs no other process is done by then, and the process with it.
        time.sleep(_SECONDS_TO_LEAVE)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code[0])

    sys.excepthook = note_error
    atexit.register(shutting_down.set)
