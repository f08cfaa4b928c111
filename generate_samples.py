from megatron.gpt2.__main__ import run

if __name__ == "__main__":
    run("generate-text")
