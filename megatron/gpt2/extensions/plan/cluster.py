"""A cluster, as `clusters/NAME.json` describes it, and the time of its kernels and collectives.

Times are in seconds. All formulas also take numpy arrays, one element per configuration.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data_utils.command_line import require

ROOT = Path(__file__).resolve().parents[4]
FLOPS_PER_MULTIPLICATION = 2


class Measured(NamedTuple):
    """A collective of `size` bytes took `seconds`, and occupied the processor that computes for `busy` seconds."""

    size: int
    seconds: float
    busy: float


def collective_key(name: str, ranks: int, nodes: int) -> str:
    """Return the key of a collective in `Cluster.collectives`."""
    return f"{name}, {ranks} ranks, {nodes} nodes"


@dataclass(frozen=True)
class Cluster:
    """Measured or fitted constants of a cluster.

    matmul_flops: rate of large matrix products, in FLOP/s.
    half_m, half_n, half_k: a product with this number of rows, columns or inner elements reaches half of
        `matmul_flops`.
    memory_bandwidth: bytes/s that element-wise kernels reach.
    kernel: seconds that a kernel takes at least.
    launch: seconds of the host per kernel.
    launch_growth: the share by which `launch` grows each time that the tensor-parallel size doubles, because the
        slowest rank decides.
    hop, network_hop: seconds per step of a ring inside a node and between nodes.
    link, data_link: bytes/s of a GPU inside a node, for tensor-parallel and data-parallel groups.
    network: bytes/s of a GPU between nodes.
    send, network_send: bytes/s between pipeline stages inside a node and between nodes.
    send_latency: seconds that a message takes at least.
    step: seconds of a step that do not depend on the model.
    adam: seconds per parameter of a rank.
    function: seconds per element in which a processor computes GELU or an exponential.
    attention: time of fused attention relative to products of its size.
    ranks_per_core: ranks that share the cores of one rank, if there are fewer cores than the ranks have threads.
    collectives: measured collectives by name and group, each with some sizes in increasing order. Measured times
        replace the formulas.
    """

    gpus_per_node: int
    memory: float
    peak_flops: float
    matmul_flops: float
    half_m: float
    half_n: float
    half_k: float
    memory_bandwidth: float
    kernel: float
    launch: float
    launch_growth: float
    hop: float
    link: float
    data_link: float
    network: float
    network_hop: float
    send: float
    send_latency: float
    network_send: float
    step: float
    adam: float
    function: float = 0.0
    attention: float = 1.0
    ranks_per_core: float = 1.0
    collectives: Mapping[str, Sequence[Measured]] = field(default_factory=dict)

    def matmul(self, m: Any, n: Any, k: Any, batch: Any = 1) -> Any:
        """Return the time of `batch` products of [m, k] and [k, n], without `kernel`. Each of the three sizes lowers
        the rate by a factor, since the tiles of a small product leave a part of the GPU idle."""
        shortfall = (1 + self.half_m / (m * batch)) * (1 + self.half_n / n) * (1 + self.half_k / k)
        return FLOPS_PER_MULTIPLICATION * m * n * k * batch * shortfall / self.matmul_flops

    def move(self, size: Any) -> Any:
        """Return the time of element-wise kernels that read and write `size` bytes in total."""
        return size / self.memory_bandwidth

    def host(self, kernels: Any, tensor_parallel: Any) -> Any:
        """Return the time in which the host launches `kernels` kernels."""
        return kernels * self.launch * (1 + self.launch_growth * np.log2(tensor_parallel))

    def all_reduce(self, size: Any, ranks: Any, stride: Any = 1, *, link: float) -> Any:
        """Return the time of an all-reduce of `size` bytes over `ranks` ranks that are `stride` apart: a ring in each
        node, at `link` bytes/s, and then a ring between nodes for each GPU's part of the data."""
        inside = np.minimum(ranks, np.maximum(self.gpus_per_node / stride, 1))
        nodes = ranks / inside
        ring = (inside - 1) * self.hop + 2 * (inside - 1) / inside * size / link
        between = (nodes - 1) * self.network_hop + 2 * (nodes - 1) / nodes * size / inside / self.network
        return ring + np.where(nodes > 1, between, 0.0)

    def measured(self, name: str, size: int, ranks: int, nodes: int) -> tuple[float, float] | None:
        """Return the time of a measured collective, and for how long it occupies the processor: linear between the
        measured sizes and beyond the largest one. Return None if it was not measured."""
        rows = self.collectives.get(collective_key(name, ranks, nodes))
        if rows is None:
            return None
        before, after = next((pair for pair in pairwise(rows) if size <= pair[1].size), rows[-2:])
        share = max((size - before.size) / (after.size - before.size), 0.0)
        seconds, busy = (first + share * (last - first) for first, last in zip(before[1:], after[1:], strict=True))
        return seconds, busy

    def point_to_point(self, size: Any, crosses_nodes: Any) -> Any:
        """Return the time in which a pipeline stage sends `size` bytes to the next stage."""
        return self.send_latency + size / np.where(crosses_nodes, self.network_send, self.send)


def read_cluster(name: str) -> tuple[Cluster, dict[str, Any]]:
    """Read `clusters/NAME.json`, or the file `name`. Return the cluster and the other contents of the file, such as
    "software". Raises ValueError if there is no such file, or if a constant is missing or is not a positive number."""
    path = Path(name) if name.endswith(".json") else ROOT / "clusters" / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        constants = content.pop("cluster")
        measured = {key: list(starmap(Measured, rows)) for key, rows in constants.pop("collectives", {}).items()}
        require(all(len(rows) > 1 for rows in measured.values()), "a collective needs at least two sizes")
        cluster = Cluster(**constants)
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json"))) or "none"
        raise ValueError(
            f"--cluster {name}: {path} cannot be read ({error.strerror}); known clusters: {known}"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"--cluster {name}: {path} does not describe a cluster: {error}") from None
    for key, value in constants.items():
        if not isinstance(value, (int, float)) or not value > 0:
            raise ValueError(f"--cluster {name}: {key} in {path} must be a positive number, not {value!r}")
    return dataclasses.replace(cluster, collectives=measured), content
