"""Text from the bytes of its tokens: never half a character, and nothing of a stop string."""

import codecs
from collections.abc import Sequence


class TextStream:
    """Bytes in, text out. It holds back the bytes of an unfinished character, and what may become a stop string."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        self._stop = stop
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes, *, last: bool = False) -> str:
        """The text that is certain once `data` has come; up to a stop string, and nothing after it.

        last: whether no more data comes. `stopped` is true from the first stop string on.
        """
        held = self._held + self._decoder.decode(data, last)
        found = [place for text in self._stop if (place := held.find(text)) >= 0]
        if found:
            self.stopped = True
            return held[: min(found)]
        sure = len(held) if last else len(held) - max((_beginning(held, text) for text in self._stop), default=0)
        self._held = held[sure:]
        return held[:sure]


def _beginning(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)
