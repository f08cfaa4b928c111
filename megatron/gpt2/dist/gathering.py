"""What every rank sees of all others. Every rank calls each of these at the same place; alone nothing is sent."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_rows(row: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """row [n] of any dtype, on the device of the rank -> [ranks, n] on the host. It waits for the device. group: None
    for the world."""
    if not dist.is_initialized():
        return row[None].cpu()
    own = row if dist.get_backend(group) == "nccl" else row.cpu()
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, own, group=group)
    return torch.stack(rows).cpu()


def gather_bytes(data: bytes, device: torch.device, group: ProcessGroup | None = None) -> list[bytes]:
    """The data of each rank, by rank. device: this rank's."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    lengths = gather_rows(torch.tensor([len(own)], device=device), group).view(-1).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    return [row[:length].numpy().tobytes() for row, length in zip(gather_rows(padded, group), lengths, strict=True)]


def gather_texts(text: str, device: torch.device, group: ProcessGroup | None = None) -> list[str]:
    """The text of each rank, by rank."""
    return [data.decode() for data in gather_bytes(text.encode(), device, group)]
