from megatron.gpt2.commands.generate_text import cli

if __name__ == "__main__":  # not in the ranks of --nproc-per-node, which import this file
    cli()
