#!/usr/bin/env python3
"""Memory and time of `tools/checkpoint.py merge`: GPT-2 345M with Adam's state, from two model-parallel ranks to one,
in our format and in Megatron's of 2019:

    python benchmarks/merge.py                      # 2 minutes, 20 GB of disk
    python benchmarks/merge.py --smoke --output DIR # a tiny model: does it run?

Anonymous memory is the tool's RssAnon, looked at every 2 ms; the files that it reads are mapped and are not in it. The
result is compared with the source, tensor by tensor.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import report
from megatron.gpt2.checkpoint.folder import Piece, write_checkpoint
from megatron.gpt2.config import Config, ModelConfig
from megatron.gpt2.model.parameters import parameter_specs

TOOL = Path(__file__).resolve().parent.parent / "tools" / "checkpoint.py"
SHAPES = {
    False: ModelConfig(
        num_layers=24, hidden_size=1024, num_attention_heads=16, max_position_embeddings=1024, vocab_size=50257
    ),
    True: ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=2, max_position_embeddings=64, vocab_size=1000),
}
KINDS = {"model": torch.bfloat16, "master": torch.float32, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
LIMIT = 1e9  # bytes of anonymous memory


def save_source(folder: Path, model: ModelConfig) -> None:
    """As two model-parallel ranks would save it. A tensor is drawn when it is written, masters and weights alike."""

    def draw(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    files: dict[str, dict[str, Piece]] = {}
    for rank in (0, 1):
        for kind, dtype in KINDS.items():
            name = "model" if kind == "model" else f"{kind}_dp_00"
            pieces = files[f"mp_rank_{rank:02d}/{name}.safetensors"] = {}
            for number, (parameter, spec) in enumerate(parameter_specs(model, 2).items()):
                if spec.dim is not None or rank == 0:
                    box = spec.box(rank, 2)
                    seed = 10 * number + 4 * rank + max(list(KINDS).index(kind) - 1, 0)
                    pieces[f"{kind}.{parameter}"] = Piece(
                        torch.empty(box.shape, dtype=dtype, device="meta"),
                        spec.global_shape,
                        box.offset,
                        functools.partial(draw, seed, box.shape, dtype),
                    )
    facts = {
        "config": Config(model=model).as_dict(),
        "vocab_size": model.vocab_size,
        "iteration": 1,
        "tokenizer": None,
        "train_iters": 1,
        "consumed_samples": 8,
        "layout": {"model_parallel_size": 2, "data_parallel_size": 1},
        "optimizer": {"good_steps": 1, "skipped_steps": 0, "adam_steps": 1, "loss_scaler": {"scale": 1.0}},
    }
    write_checkpoint(folder, 1, facts=facts, files=files, rank=0, world_size=1, attempt="a", timeout_s=60)


def run(*arguments: str) -> dict[str, float]:
    """The tool with these arguments: seconds, and the greatest anonymous memory seen, in bytes."""
    began, peak = time.perf_counter(), 0
    tool = subprocess.Popen([sys.executable, str(TOOL), *arguments], stdout=subprocess.DEVNULL)
    while tool.poll() is None:
        status = Path(f"/proc/{tool.pid}/status").read_text()
        if found := re.search(r"RssAnon:\s+(\d+) kB", status):
            peak = max(peak, 1024 * int(found[1]))
        time.sleep(0.002)
    if tool.returncode:
        sys.exit(f"{' '.join(arguments)} failed")
    return {"seconds": time.perf_counter() - began, "anonymous_bytes": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="DIR", help="folder of merge.json (default: benchmarks/results)")
    parser.add_argument("--scratch", metavar="DIR", help="folder with room for the checkpoints")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: proves the script")
    chosen = parser.parse_args()
    model, measured = SHAPES[chosen.smoke], {}
    heads = ["--num-attention-heads", str(model.num_attention_heads), "--vocab-size", str(model.vocab_size)]
    with tempfile.TemporaryDirectory(dir=chosen.scratch) as scratch:
        source, theirs, merged = (Path(scratch) / name for name in ("two", "two_2019", "one"))
        save_source(source, model)
        measured["no work: inspect"] = run("inspect", str(source))
        measured["merge"] = run("merge", str(source), str(merged))
        run("diff", str(source), str(merged))
        shutil.rmtree(merged)
        measured["convert --to megatron-2019"] = run(
            "convert", str(source), str(theirs), "--to", "megatron-2019", "--model-parallel-size", "2"
        )
        measured["merge, Megatron 2019's files"] = run("merge", str(theirs), str(merged), *heads)
        run("diff", str(source), str(merged), *heads)
    print(
        report.table(
            ["", "seconds", "anonymous memory, MB"],
            [
                [name, f"{figures['seconds']:.1f}", f"{figures['anonymous_bytes'] / 1e6:,.0f}"]
                for name, figures in measured.items()
            ],
        )
    )
    greatest = max(figures["anonymous_bytes"] for figures in measured.values())
    print(f"\nat most {greatest / 1e6:,.0f} MB; asked: at most {LIMIT / 1e6:,.0f}")
    output = Path(chosen.output) if chosen.output else report.RESULTS
    report.write(
        output / "merge.json",
        {
            **report.header("merging a checkpoint of two ranks"),
            "model": dataclasses.asdict(model),
            "limit_bytes": LIMIT,
            "runs": measured,
        },
    )
    return int(greatest > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
