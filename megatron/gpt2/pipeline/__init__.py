"""Pipeline parallelism: the layers of each stage, the order of work on each rank, and the messages between ranks.

Legend: p ranks of a pipeline, v chunks of the model per rank, m micro-batches. torch is not imported here."""
