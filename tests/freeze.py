"""Imported last by a process that forks: what is there stays out of garbage collection, which would copy all of it in
each child."""

import gc

gc.freeze()
