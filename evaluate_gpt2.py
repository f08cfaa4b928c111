from megatron.gpt2.commands.evaluate_gpt2 import cli

if __name__ == "__main__":  # not in the ranks of --nproc-per-node, which import this file
    cli()
