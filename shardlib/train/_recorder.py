"""Who hands the records of a run to its sinks, as long as its folder is its own."""

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardlib._lock import TakenError
from shardlib._progress import say
from shardlib.train._folder import Occupied
from shardlib.train._sinks import Sink


class Recorder:
    """The sinks of a run, and the folder that they may write into.

    Processes other than the first have no sinks. `held` is the folder, once the run has it.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = sinks
        self.held = Occupied(None)
        self.folder_lost = False  # to another run

    def may_write(self) -> bool:
        """Whether the folder is still this run's.

        If it is not, a run of one process ends here by a `TakenError`. Several end together after
        one step, which a SIGTERM to this process makes JAX choose, and write nothing until then.
        """
        try:
            self.held.check()
        except TakenError:
            if jax.process_count() == 1:
                raise
            if not self.folder_lost:
                # By which JAX finds a step after which all can stop.
                os.kill(os.getpid(), signal.SIGTERM)
            self.folder_lost = True
        except OSError as error:
            say(f"whether the folder of the run is another's cannot be seen: {error}")
            return False
        return not self.folder_lost

    def record(self, record: Mapping[str, Any]) -> None:
        """Hand a record to every sink, as long as the folder is this run's.

        A sink that cannot write is named on standard error, and the run goes on.
        """
        if not self.sinks or not self.may_write():
            return
        for sink in self.sinks:
            try:
                sink(record)
            except OSError as error:  # a record less, and no reason to end a run
                say(f"a record of step {record['step']} could not be written: {error}")

    def record_evaluation(self, step: int, measured: Mapping[str, Any]) -> None:
        """Record what was measured of the state after a step, if anything was."""
        if measured:
            numbers = {f"evaluation/{name}": value for name, value in measured.items()}
            self.record({"step": step, **numbers})
