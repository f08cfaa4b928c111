"""`python -m megatron.pretrain_gpt2 [flags]` trains, as `gpt2 pretrain` does."""

from megatron.gpt2.__main__ import run

if __name__ == "__main__":  # Child processes import this file under a different name.
    run("pretrain")
