"""Books of the device cache: blocks, block tables, slots, prefixes.

Integers only; tensors live elsewhere.
"""

from deepinfer_core.cache.block_pool import BlockPool, BlockPools, BlockState, Owner, PoolExhausted
from deepinfer_core.cache.block_table import BlockTables, num_blocks_for
from deepinfer_core.cache.slots import SlotPool

__all__ = [
    "BlockPool",
    "BlockPools",
    "BlockState",
    "BlockTables",
    "Owner",
    "PoolExhausted",
    "SlotPool",
    "num_blocks_for",
]
