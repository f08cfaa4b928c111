"""Pipeline parallelism: which layers each stage holds, what each rank does in which order, and what the ranks exchange.

Legend: p ranks of a pipeline, v chunks of the model per rank, m micro-batches. torch is not imported here."""
