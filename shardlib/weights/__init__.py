"""Weights in files that other frameworks write and read: safetensors, by a table of names and forms.

>>> import shardlib as sl
>>> rule = sl.weights.Rule("h.{layers}.w", "blocks/kernel", "(heads size) in -> layers heads size in")
>>> sl.weights.Table((rule,)).rules[0].counters
('layers',)
"""

from shardlib.weights._load import load as load
from shardlib.weights._save import save as save
from shardlib.weights._table import Part as Part
from shardlib.weights._table import Rule as Rule
from shardlib.weights._table import Table as Table
from shardlib.weights._tensor_files import TensorFiles as TensorFiles
from shardlib.weights._tensor_files import open_tensors as open_tensors
