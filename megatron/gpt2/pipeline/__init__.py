"""Pipeline parallelism: the layers of each rank, the order of its work, and the messages between ranks.

Legend: pp ranks of a pipeline, vpp model chunks per rank, m micro-batches. torch is not imported here."""
