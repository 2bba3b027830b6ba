"""Weights in safetensors files, which other frameworks write and read, by a table of names."""

from shardlib.weights._hub import local_folder as local_folder
from shardlib.weights._load import load as load
from shardlib.weights._save import save as save
from shardlib.weights._table import Part as Part
from shardlib.weights._table import Rule as Rule
from shardlib.weights._table import Span as Span
from shardlib.weights._table import Table as Table
from shardlib.weights._tensor_files import TensorFiles as TensorFiles
from shardlib.weights._tensor_files import open_tensors as open_tensors
