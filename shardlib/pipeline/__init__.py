"""Pipelines: schedules as tables, played through without JAX, and run by
`sl.Strategy(pipeline=...)`.
"""

from shardlib.pipeline._draw import svg as svg
from shardlib.pipeline._draw import text as text
from shardlib.pipeline._schedule import Schedule as Schedule
from shardlib.pipeline._schedules import SCHEDULES as SCHEDULES
from shardlib.pipeline._schedules import ZBH1 as ZBH1
from shardlib.pipeline._schedules import ZBH2 as ZBH2
from shardlib.pipeline._schedules import ZBV as ZBV
from shardlib.pipeline._schedules import DualPipeV as DualPipeV
from shardlib.pipeline._schedules import Eager1F1B as Eager1F1B
from shardlib.pipeline._schedules import GPipe as GPipe
from shardlib.pipeline._schedules import Interleaved as Interleaved
from shardlib.pipeline._schedules import OneFOneB as OneFOneB
from shardlib.pipeline._schedules import VHalf as VHalf
from shardlib.pipeline._schedules import VMin as VMin
from shardlib.pipeline._schedules import ZeroBubble as ZeroBubble
from shardlib.pipeline._simulate import UNIT as UNIT
from shardlib.pipeline._simulate import Costs as Costs
from shardlib.pipeline._simulate import Ticks as Ticks
from shardlib.pipeline._simulate import Timeline as Timeline
from shardlib.pipeline._simulate import pack as pack
from shardlib.pipeline._simulate import simulate as simulate
from shardlib.pipeline._table import Custom as Custom
from shardlib.pipeline._table import Op as Op
from shardlib.pipeline._table import Table as Table
