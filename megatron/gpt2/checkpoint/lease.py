"""The lease of a --save folder: only its owner can commit a checkpoint. It needs no locks of the file system.

    lease_0000000012     the owner's name; the number is the fencing token, and the highest number is the owner

A network that is cut can leave two halves of a run that both go on. Each start takes the next number, which only one
process can create, and removes the file of the owner before it. Before each commit, the owner checks that its file is
still there. The check is not sufficient: the process may stop between the check and the commit. So a new owner also takes away
what an earlier owner has not yet committed. The commit is a rename of these files, which then fails.

A start waits LIFETIME seconds to see whether an earlier owner still renews its lease. It does not wait if that owner has
ended properly, or ran on this machine and no longer holds the lock of the folder.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import BinaryIO

from data_utils.files import add_path, fsync_path, no_follow, try_lock
from megatron.gpt2.checkpoint.folder import BEST, TRACKER, FolderInUse, Log, lock_folder

PATTERN = "lease_" + 10 * "[0-9]"
RENEWAL_INTERVAL = 2.0  # seconds
LIFETIME = 10.0  # seconds without a renewal after which a lease has ended


class LeaseLostError(OSError):
    """A later run has taken the folder. The message is one line."""


class Lease:
    """The lock and the lease of a folder, which a thread renews until `release`. The arguments are those of `take`.

    lock: the open lock file. is_lost: whether a later run was seen to have the folder.
    """

    def __init__(self, folder: Path, log: Log) -> None:
        self._folder, self.is_lost, self._released = folder, False, threading.Event()
        self.take(log)
        self._renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewal.start()

    def take(self, log: Log) -> None:
        """Lock the folder and take its lease; again, if the folder was removed or moved. Raises FolderInUse if another
        run holds the lock or renews its lease, and ValueError as `lock_folder`."""
        folder, host = self._folder, socket.gethostname()
        lock, text = lock_folder(folder, log), f"process {os.getpid()} on {host}, {secrets.token_hex(8)}\n"
        while True:
            newest = max(folder.glob(PATTERN), default=folder / f"lease_{0:010d}")
            owner = _read(newest)
            if owner and not (f" on {host}, " in owner and _is_locked(lock)) and _is_renewed(newest):
                lock.close()
                raise FolderInUse(
                    f"--save {folder} is in use by {owner.partition(',')[0]}: wait for that run, end it, or give this "
                    "one another --save"
                )
            path = folder / f"lease_{int(newest.name.partition('_')[2]) + 1:010d}"
            try:
                with open(path, "xb", opener=no_follow) as file:
                    file.write(text.encode())
                break
            except FileExistsError:
                pass  # another start has taken this number
            except OSError as error:
                add_path(error, path)
                raise
        for earlier in folder.glob(PATTERN):
            if earlier.name < path.name:
                earlier.unlink(missing_ok=True)
        fsync_path(folder)
        self.lock, self._path, self._text = lock, path, text
        self._take_away_uncommitted()

    def check(self) -> None:
        """Call this before each commit. Raises LeaseLostError if this run is no longer the owner of the folder."""
        later = [path for path in self._folder.glob(PATTERN) if path.name != self._path.name]
        # Without any lease, the folder was removed or moved, and no other run has it.
        if _read(self._path) != self._text and (self._path.exists() or later):
            self.is_lost = True
            owner = _read(max(later, default=self._path)).partition(",")[0] or "a later run"
            raise LeaseLostError(f"--save {self._folder} now belongs to {owner}: this run no longer saves there")

    def is_held(self) -> bool:
        """Return whether this run is still the owner of the folder."""
        with contextlib.suppress(LeaseLostError):
            self.check()
            return True
        return False

    def release(self) -> None:
        """End the lease and the lock. The file of the lease stays, so that the next number is higher."""
        self._released.set()
        self._renewal.join(RENEWAL_INTERVAL)  # storage that does not answer must not keep the process
        with contextlib.suppress(OSError):
            if _read(self._path) == self._text:
                os.truncate(self._path, 0)
        self.lock.close()

    def _renew(self) -> None:
        while not self._released.wait(RENEWAL_INTERVAL) and not self.is_lost:
            with contextlib.suppress(OSError):
                self.check()
                os.utime(self._path)

    def _take_away_uncommitted(self) -> None:
        """Rename what an earlier owner may be about to commit. The next save removes the renamed folders."""
        for folder in (self._folder, self._folder / BEST):
            for path in [*folder.glob("iter_*.tmp-*"), folder / f"{TRACKER}.tmp"]:
                with contextlib.suppress(OSError):
                    path.rename(path.with_name(f"iter_0000000.tmp-{secrets.token_hex(8)}"))


def _read(path: Path) -> str:
    """Return the text of a lease, "" if it is released or gone. Opening the file gets the current one from a network
    file system, unlike `stat`."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=no_follow) as file:
        return file.read(200).decode(errors="replace")
    return ""


def _is_locked(lock: BinaryIO) -> bool:
    """Return whether this process holds the lock of the folder. False on a file system without locks."""
    with contextlib.suppress(OSError):
        return try_lock(lock)
    return False


def _is_renewed(path: Path) -> bool:
    """Wait LIFETIME seconds, and return whether the owner has renewed the lease in this time."""
    first, end = _renewed_at(path), time.monotonic() + LIFETIME
    while time.monotonic() < end:
        time.sleep(RENEWAL_INTERVAL / 4)
        if _renewed_at(path) != first:
            return True
    return False


def _renewed_at(path: Path) -> int:
    with contextlib.suppress(OSError), open(path, "rb", opener=no_follow) as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return 0
