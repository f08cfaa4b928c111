"""Import gc_freeze last in a process that forks. Garbage collection then skips the existing objects, which it would
otherwise copy in each child."""

import gc

gc.freeze()
