# microsoft/DeepSpeedExamples at 88dbea61 (2023),
# training/megatron/Megatron-LM/scripts/ds_zero-offload_pretrain_gpt2_model_parallel.sh: the line that it runs
deepspeed --num_nodes 1 --num_gpus 16 pretrain_gpt2.py \
       --model-parallel-size 4 \
       --num-layers 4 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --batch-size 12 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --train-iters 400 \
       --resume-dataloader \
       --train-data webtext \
       --lazy-loader \
       --tokenizer-type GPT2BPETokenizer \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 0.00015 \
       --no-load-optim \
       --lr-decay-style cosine \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --warmup .01 \
       --checkpoint-activations \
       --deepspeed-activation-checkpointing \
       --fp16 \
       --log-interval 5 \
       --deepspeed \
       --deepspeed_config ./ds_zero-offload_config.json
