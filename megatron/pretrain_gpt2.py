"""`python -m megatron.pretrain_gpt2 [flags]` trains; the program is megatron/gpt2/commands/pretrain_gpt2.py."""

from megatron.gpt2.commands.pretrain_gpt2 import cli, main

__all__ = ["cli", "main"]

if __name__ == "__main__":  # not in the ranks of --nproc-per-node, which import this file
    cli()
