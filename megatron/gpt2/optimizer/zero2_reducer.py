"""Gradients that are sharded between micro-batches too (--shard-gradients)."""

from megatron.gpt2.optimizer.gradient_reducer import GradientReducer


class ShardedGradientReducer(GradientReducer):
    """The same, by ZeRO stage 2 (arXiv:1910.02054): each micro-batch sends its gradients, and between them a rank keeps
    the sums of what it owns alone. Of whole buckets there are at most the one that backward fills and the one before
    it, which is on its way. Backward of a micro-batch comes after that of the one before.
    """

    def begin(self, micro_batches: int) -> None:
        """As `GradientReducer.begin`."""
        self._rounds, self._received = micro_batches, 0
        super().begin(1 if micro_batches else 0)

    def _send_ready(self) -> None:
        super()._send_ready()
        is_last = len(self._sent) == len(self._flat.buckets)
        while self._received < len(self._sent) - (0 if is_last else 1):
            self._receive(self._received)
            self._received += 1
        if is_last:
            self._sent.clear()
            self.begin(self._rounds - 1)

    def _receive(self, index: int) -> None:
        self._flat.keep_owned(index, self._arrived(index))
