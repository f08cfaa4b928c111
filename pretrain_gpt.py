from megatron.pretrain_gpt2 import main

if __name__ == "__main__":  # not in the ranks of --nproc-per-node, which import this file
    raise SystemExit(main())
