"""What every rank of the world sees of all others. Every rank calls each of these at the same place."""

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(row: Tensor) -> Tensor:
    """row [n] int64, on the device of the rank -> [ranks, n] on the host. It waits for the device."""
    if not dist.is_initialized():
        return row[None].cpu()
    own = row if dist.get_backend() == "nccl" else row.cpu()
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return torch.stack(rows).cpu()


def gather_texts(text: str, device: torch.device) -> list[str]:
    """The text of each rank, by rank."""
    own = torch.tensor(list(text.encode()), dtype=torch.int64, device=device)
    lengths = gather_rows(torch.tensor([len(own)], device=device)).view(-1).tolist()
    padded = torch.zeros(max(lengths), dtype=torch.int64, device=device)
    padded[:len(own)] = own
    return [bytes(row[:length].tolist()).decode() for row, length in zip(gather_rows(padded), lengths, strict=True)]
