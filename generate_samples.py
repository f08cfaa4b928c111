from megatron.gpt2.__main__ import run

if __name__ == "__main__":  # false in child processes, which import this file
    run("generate-text")
