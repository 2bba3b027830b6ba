"""What is sent between devices in fewer bytes, or less often: codecs, collectives around them,
exchanges of gradients made of these, workers that train apart and meet, and a server for them.
"""

from shardlib.collectives._codecs import Codec as Codec
from shardlib.collectives._codecs import Encoded as Encoded
from shardlib.collectives._codecs import Integers as Integers
from shardlib.collectives._codecs import Signs as Signs
from shardlib.collectives._compressed import Errors as Errors
from shardlib.collectives._compressed import no_errors as no_errors
from shardlib.collectives._compressed import pmean as pmean
from shardlib.collectives._compressed import pmean_bytes as pmean_bytes
from shardlib.collectives._compressed_shards import all_gather as all_gather
from shardlib.collectives._compressed_shards import all_gather_bytes as all_gather_bytes
from shardlib.collectives._compressed_shards import psum_scatter as psum_scatter
from shardlib.collectives._compressed_shards import psum_scatter_bytes as psum_scatter_bytes
from shardlib.collectives._exact import ExchangeInputs as ExchangeInputs
from shardlib.collectives._exact import Parameter as Parameter
from shardlib.collectives._exchanges import OneBit as OneBit
from shardlib.collectives._exchanges import Quantised as Quantised
from shardlib.collectives._largest import TopK as TopK
from shardlib.collectives._low_rank import PowerSGD as PowerSGD
from shardlib.collectives._meetings import DiLoCo as DiLoCo
from shardlib.collectives._meetings import ElasticAveraging as ElasticAveraging
from shardlib.collectives._meetings import LocalSGD as LocalSGD
from shardlib.collectives._server import ParameterServer as ParameterServer
