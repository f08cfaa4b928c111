"""The lease of a --save folder: only its owner can commit a checkpoint. The lease needs no locks of the file system.

    lease_0000000012     the owner's name; the number is the fencing token, and the highest number is the owner

If a network fails, a restarted run and the old one may run at the same time. Each start creates the file with the next
number, which only one process can do, and removes the file of the earlier owner. Before each commit, the owner checks
that its file still exists. The check is not sufficient, because the process may be suspended between the check and the
commit. A new owner therefore also removes the uncommitted files of earlier owners. A commit renames uncommitted files,
so a late commit of an earlier owner fails.

The owner sets the file's time every two seconds; a time of 0 ends the lease. If the file system has locks, the owner
also locks its file. A start is refused if the newest file is locked. Otherwise the start waits LIFETIME seconds to see
whether the owner still sets the time. The start does not wait if the lease has ended, or if the owner ran on this
machine: the system has then removed the lock of a dead process.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from data_utils.files import add_path, fsync_path, no_follow, try_lock
from megatron.gpt2.checkpoint.save_folder import BEST, LATEST_FILE, FolderInUse, make_save_folder

RENEWAL_INTERVAL = 2.0  # seconds between two renewals
PATTERN = "lease_" + 10 * "[0-9]"
LIFETIME = 10.0  # seconds without a renewal after which a lease ends


class LeaseLostError(OSError):
    """Raised if a later run has taken the folder. The message is one line."""


class Lease:
    """The lease of a folder. A thread renews the lease until `release` is called.

    is_lost: True after `check` has found that a later run owns the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.is_lost, self._released = folder, False, threading.Event()
        self.take()
        self._renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewal.start()

    def take(self) -> None:
        """Make the folder and take its lease. Call this method again if the folder was removed or moved. Raises
        FolderInUse if another run owns the folder, and the errors of `make_save_folder`."""
        make_save_folder(self._folder)
        text = f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(8)}\n"
        while True:
            path = self._folder / f"lease_{check_not_in_use(self._folder) + 1:010d}"
            try:
                file = open(path, "x+b", buffering=0, opener=no_follow)  # noqa: SIM115
                break
            except FileExistsError:
                pass  # Another start of a run has already taken this number.
            except OSError as error:
                add_path(error, path)
                raise ValueError(f"--save {self._folder}: cannot be written: {error.strerror}") from error
        with contextlib.suppress(OSError):  # The file system may have no locks.
            try_lock(file)
        file.write(text.encode())
        for earlier in self._folder.glob(PATTERN):
            if earlier.name < path.name:
                earlier.unlink(missing_ok=True)
        fsync_path(self._folder)
        self._file, self._path, self._text = file, path, text
        self._remove_uncommitted()

    def check(self) -> None:
        """Call this method before each commit. Raises LeaseLostError if this run is no longer the owner of the
        folder."""
        later = [path for path in self._folder.glob(PATTERN) if path.name != self._path.name]
        # Without a lease, the folder was removed or moved, and no other run uses the folder.
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

    def is_gone(self) -> bool:
        """Return whether the folder was removed, moved or replaced. Call this method after `check`."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except OSError as error:  # Any other error than a missing folder may be temporary.
            return isinstance(error, FileNotFoundError | NotADirectoryError)

    def release(self) -> None:
        """End the lease. The lease's file stays, so that the next lease has a higher number."""
        self._released.set()
        self._renewal.join(RENEWAL_INTERVAL)  # Storage that does not answer must not keep the process from ending.
        with contextlib.suppress(OSError):
            os.utime(self._file.fileno(), (0, 0))
        self._file.close()

    def _renew(self) -> None:
        while not self._released.wait(RENEWAL_INTERVAL) and not self.is_lost:
            with contextlib.suppress(OSError):
                self.check()
                os.utime(self._file.fileno())

    def _remove_uncommitted(self) -> None:
        """Remove uncommitted files of earlier owners. Folders are renamed, and the next save deletes the renamed
        folders."""
        for folder in (self._folder, self._folder / BEST):
            with contextlib.suppress(OSError):
                for path in folder.glob(f"{LATEST_FILE}.tmp*"):
                    path.unlink(missing_ok=True)
            for path in folder.glob("iter_*.tmp-*"):
                with contextlib.suppress(OSError):
                    path.rename(path.with_name(f"iter_0000000.tmp-{secrets.token_hex(8)}"))


def check_not_in_use(folder: Path) -> int:
    """Return the number of the newest lease of `folder`, or 0 if there is none. Raises FolderInUse if the owner of the
    newest lease still uses the folder."""
    newest = max(folder.glob(PATTERN), default=None)
    if newest is None:
        return 0
    if _is_owned(newest):
        owner = _read(newest).strip().partition(",")[0] or "another process"
        raise FolderInUse(
            f"--save {folder} is in use by {owner}: wait for that run, end it, or give this one another --save"
        )
    return int(newest.name.partition("_")[2])


def _is_owned(path: Path) -> bool:
    """Return whether the lease `path` has a live owner. The function may wait for LIFETIME seconds."""
    renewed = _renewed_at(path)
    with contextlib.suppress(OSError), open(path, "r+b", opener=no_follow) as file:
        if not try_lock(file):
            return True
        if f" on {socket.gethostname()}, ".encode() in file.read(200):
            return False
    end = time.monotonic() + LIFETIME
    while renewed and time.monotonic() < end:
        time.sleep(RENEWAL_INTERVAL / 4)
        if _renewed_at(path) not in (0, renewed):
            return True
    return False


def _read(path: Path) -> str:
    """Return the text of a lease, or "" if the file is gone. On a network file system, opening a file reads its current
    version, unlike `stat`."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb", opener=no_follow) as file:
        return file.read(200).decode(errors="replace")
    return ""


def _renewed_at(path: Path) -> int:
    """Return the time of the last renewal, in ns, or 0 if the lease has ended."""
    with contextlib.suppress(OSError), open(path, "rb", opener=no_follow) as file:
        return os.fstat(file.fileno()).st_mtime_ns
    return 0
