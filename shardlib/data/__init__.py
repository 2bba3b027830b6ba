"""Data: texts as tokens on disk, and examples of one length from them, every process its own
share.
"""

from shardlib.data._chat import Chat as Chat
from shardlib.data._corpus import Corpus as Corpus
from shardlib.data._corpus import Skipped as Skipped
from shardlib.data._sequences import Reader as Reader
from shardlib.data._sequences import Sequences as Sequences
from shardlib.data._store import cache_folder as cache_folder
from shardlib.data._store import prepare as prepare
from shardlib.data._tokenizer import Tokenizer as Tokenizer
from shardlib.data._tokenizer import load_tokenizer as load_tokenizer
from shardlib.data._tokens import Prepared as Prepared
from shardlib.data._tokens import Tokens as Tokens
