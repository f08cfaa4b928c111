"""Worker processes that end with the program that started them, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """End this worker process when its parent ends. Call it when the worker starts. Without it a worker whose parent
    was killed would wait for work for ever, and would hold the parent's locks."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
