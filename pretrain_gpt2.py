from megatron.pretrain_gpt2 import main

raise SystemExit(main())
