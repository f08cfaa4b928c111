from megatron.gpt2.commands.pretrain_gpt2 import cli

if __name__ == "__main__":  # not in the ranks of --nproc-per-node, which import this file
    cli()
