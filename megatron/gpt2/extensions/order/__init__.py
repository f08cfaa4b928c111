"""Prove that no rank of a parallel program can wait forever, and that its calls match. The modules in reading order:

recording   records the communication of one rank, in one process and without the other ranks
proof       plays the records of all ranks back, and describes the first fault
command     tools/prove_order.py: records a small run with the layout of a command line
"""

from megatron.gpt2.extensions.order.proof import prove as prove
from megatron.gpt2.extensions.order.recording import RankRecord as RankRecord
from megatron.gpt2.extensions.order.recording import record as record
