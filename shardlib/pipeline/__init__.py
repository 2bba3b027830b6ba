"""Pipelines: schedules as tables, played through without JAX, and run by
`sl.Strategy(pipeline=...)`.
"""

from shardlib.pipeline.schedules._draw import svg as svg
from shardlib.pipeline.schedules._draw import text as text
from shardlib.pipeline.schedules._published import SCHEDULES as SCHEDULES
from shardlib.pipeline.schedules._published import ZBH1 as ZBH1
from shardlib.pipeline.schedules._published import ZBH2 as ZBH2
from shardlib.pipeline.schedules._published import ZBV as ZBV
from shardlib.pipeline.schedules._published import DualPipeV as DualPipeV
from shardlib.pipeline.schedules._published import Eager1F1B as Eager1F1B
from shardlib.pipeline.schedules._published import GPipe as GPipe
from shardlib.pipeline.schedules._published import Interleaved as Interleaved
from shardlib.pipeline.schedules._published import OneFOneB as OneFOneB
from shardlib.pipeline.schedules._published import VHalf as VHalf
from shardlib.pipeline.schedules._published import VMin as VMin
from shardlib.pipeline.schedules._published import ZeroBubble as ZeroBubble
from shardlib.pipeline.schedules._schedule import Schedule as Schedule
from shardlib.pipeline.schedules._simulate import UNIT as UNIT
from shardlib.pipeline.schedules._simulate import Costs as Costs
from shardlib.pipeline.schedules._simulate import Ticks as Ticks
from shardlib.pipeline.schedules._simulate import Timeline as Timeline
from shardlib.pipeline.schedules._simulate import pack as pack
from shardlib.pipeline.schedules._simulate import simulate as simulate
from shardlib.pipeline.schedules._table import Custom as Custom
from shardlib.pipeline.schedules._table import Op as Op
from shardlib.pipeline.schedules._table import Table as Table
