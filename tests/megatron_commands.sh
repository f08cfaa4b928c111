# Command lines of other projects, as their scripts have them. tests/test_megatron_commands.py runs each with a few flags
# appended. Variables are kept, comments and the last `set +x` are not. Of scripts that build the line from switches,
# only the line is kept.

## 3D_parallelism_ds_pretrain_gpt2.sh
# microsoft/DeepSpeedExamples at 88dbea61 (2023),
# training/megatron/Megatron-LM-v1.1.5-3D_parallelism/examples/ds_pretrain_gpt2.sh: the line that it runs
deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt2.py \
       --model-parallel-size 4 \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --batch-size 9 \
       --train-iters 320000 \
       --lr-decay-iters 320000 \
       --save checkpoints/gpt2_345m_ds \
       --load checkpoints/gpt2_345m_ds \
       --data-path data/webtext/webtext_text_document \
       --vocab-file data/gpt2-vocab.json \
       --merge-file data/gpt2-merges.txt \
       --data-impl mmap \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 1.5e-4 \
       --lr-decay-style cosine \
       --min-lr 1.0e-5 \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --warmup 0.01 \
       --checkpoint-activations \
       --log-interval 100 \
       --save-interval 10000 \
       --eval-interval 1000 \
       --eval-iters 10 \
       --fp16 \
       --tensorboard-dir tensorboard_data/24l_1024h_1n_8g_4mp_9b_ds4 \
       --deepspeed \
       --deepspeed_config ./ds_zero_stage_2_config.json \
       --zero-stage 0 \
       --zero-reduce-bucket-size 50000000 \
       --zero-allgather-bucket-size 5000000000 \
       --zero-contigious-gradients \
       --zero-reduce-scatter \
       --checkpoint-activations \
       --checkpoint-num-layers 1 \
       --partition-activations \
       --synchronize-each-layer \
       --contigious-checkpointing

## 3D_parallelism_ds_pretrain_gpt2_pipe.sh
# microsoft/DeepSpeedExamples at 88dbea61 (2023),
# training/megatron/Megatron-LM-v1.1.5-3D_parallelism/examples/ds_pretrain_gpt2_pipe.sh: the line that it runs
deepspeed --num_nodes 1 --num_gpus 16 pretrain_gpt2.py \
       --model-parallel-size 2 \
       --pipe-parallel-size 2 \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --batch-size 4 \
       --gas 16 \
       --train-iters 320000 \
       --lr-decay-iters 320000 \
       --save checkpoints/gpt2_345m_ds \
       --load checkpoints/gpt2_345m_ds \
       --data-path data/webtext/webtext_text_document \
       --vocab-file data/gpt2-vocab.json \
       --merge-file data/gpt2-merges.txt \
       --data-impl mmap \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 1.5e-4 \
       --lr-decay-style cosine \
       --min-lr 1.0e-5 \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --warmup 0.01 \
       --checkpoint-activations \
       --log-interval 1 \
       --save-interval 500 \
       --eval-interval 100 \
       --eval-iters 10 \
       --fp16 \
       --tensorboard-dir tensorboard_data/24l_1024h_1n_16g_2pp_2mp_4b_ds4 \
       --deepspeed \
       --deepspeed_config ./ds_config.json \
       --zero-stage 0 \
       --zero-reduce-bucket-size 50000000 \
       --zero-allgather-bucket-size 5000000000 \
       --zero-contigious-gradients \
       --zero-reduce-scatter \
       --checkpoint-activations \
       --checkpoint-num-layers 1 \
       --partition-activations \
       --synchronize-each-layer \
       --contigious-checkpointing

## ZeRO3_curriculum_ds_pretrain_gpt2.sh
# microsoft/DeepSpeedExamples at 88dbea61 (2023),
# training/megatron/Megatron-LM-v1.1.5-ZeRO3/curriculum_learning/ds_pretrain_gpt2.sh: the line that it runs
# with the baseline's arguments of its ds_train.sh, and shorter names of the folders that it writes
deepspeed --num_nodes 16 --num_gpus 8 ../pretrain_gpt2.py \
       --model-parallel-size 1 \
       --num-layers 48 \
       --hidden-size 1600 \
       --num-attention-heads 25 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --batch-size 4 \
       --train-iters 600000 \
       --train-tokens 157286400000 \
       --lr-decay-tokens 157286400000 \
       --save checkpoints/gpt2_1558M_curriculum \
       --load checkpoints/gpt2_1558M_curriculum \
       --data-path /vc_data/Megatron-LM/data/indexed_datasets/megatron \
       --vocab-file /vc_data/Megatron-LM/data/gpt2-vocab.json \
       --merge-file /vc_data/Megatron-LM/data/gpt2-merges.txt \
       --data-impl mmap \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 1.5e-4 \
       --lr-decay-style cosine \
       --min-lr 1.0e-5 \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --warmup-iters 3000 \
       --checkpoint-activations \
       --log-interval 100 \
       --save-interval 5000 \
       --eval-interval 100 \
       --eval-iters 10 \
       --fp16 \
       --seed 1234 \
       --tensorboard-dir tensorboard/gpt2_1558M_curriculum \
       --deepspeed \
       --deepspeed_config ./ds_zero_stage_2_config_baseline.json \
       --zero-stage 2 \
       --zero-reduce-bucket-size 50000000 \
       --zero-allgather-bucket-size 5000000000 \
       --zero-contigious-gradients \
       --zero-reduce-scatter \
       --deepspeed-activation-checkpointing \
       --checkpoint-num-layers 1 \
       --partition-activations \
       --synchronize-each-layer \
       --contigious-checkpointing

## ZeRO3_ds_pretrain_gpt2-zero2.sh
# microsoft/DeepSpeedExamples at 88dbea61 (2023),
# training/megatron/Megatron-LM-v1.1.5-ZeRO3/examples/ds_pretrain_gpt2-zero2.sh: the line that it runs
deepspeed --num_nodes 1 --num_gpus 1 pretrain_gpt2.py \
       --model-parallel-size 1 \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --batch-size 4 \
       --train-iters 320000 \
       --lr-decay-iters 320000 \
       --save checkpoints/gpt2_345m_ds \
       --load checkpoints/gpt2_345m_ds \
       --data-path /data/Megatron-LM/data/indexed_datasets/megatron \
       --vocab-file /data/Megatron-LM/data/gpt2-vocab.json \
       --merge-file /data/Megatron-LM/data/gpt2-merges.txt \
       --data-impl mmap \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 1.5e-4 \
       --lr-decay-style cosine \
       --min-lr 1.0e-5 \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --warmup 0.01 \
       --checkpoint-activations \
       --log-interval 1 \
       --save-interval 10000 \
       --eval-interval 2000 \
       --eval-iters 10 \
       --fp16 \
       --scattered-embeddings \
       --split-transformers \
       --deepspeed \
       --deepspeed_config ./ds_zero_stage_2_config.json \
       --zero-stage 2 \
       --zero-reduce-bucket-size 50000000 \
       --zero-allgather-bucket-size 5000000000 \
       --zero-contigious-gradients \
       --zero-reduce-scatter \
       --deepspeed-activation-checkpointing \
       --checkpoint-num-layers 1 \
       --partition-activations \
       --checkpoint-in-cpu \
       --synchronize-each-layer \
       --contigious-checkpointing

## ZeRO3_ds_pretrain_gpt2-zero3.sh
# microsoft/DeepSpeedExamples at 88dbea61 (2023),
# training/megatron/Megatron-LM-v1.1.5-ZeRO3/examples/ds_pretrain_gpt2-zero3.sh: the line that it runs
deepspeed --num_nodes 1 --num_gpus 1 pretrain_gpt2.py \
       --model-parallel-size 1 \
       --num-layers 5 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --batch-size 4 \
       --train-iters 320000 \
       --lr-decay-iters 320000 \
       --save checkpoints/gpt2_345m_ds \
       --load checkpoints/gpt2_345m_ds \
       --data-path /data/Megatron-LM/data/indexed_datasets/megatron \
       --vocab-file /data/Megatron-LM/data/gpt2-vocab.json \
       --merge-file /data/Megatron-LM/data/gpt2-merges.txt \
       --data-impl mmap \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 1.5e-4 \
       --lr-decay-style cosine \
       --min-lr 1.0e-5 \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --warmup 0.01 \
       --checkpoint-activations \
       --log-interval 1 \
       --save-interval 10000 \
       --eval-interval 2000 \
       --eval-iters 10 \
       --fp16 \
       --scattered-embeddings \
       --split-transformers \
       --deepspeed \
       --deepspeed_config ./ds_zero_stage_3_config.json \
       --zero-stage 3 \
       --zero-reduce-bucket-size 50000000 \
       --zero-allgather-bucket-size 5000000000 \
       --zero-contigious-gradients \
       --zero-reduce-scatter \
       --deepspeed-activation-checkpointing \
       --checkpoint-num-layers 1 \
       --partition-activations \
       --checkpoint-in-cpu \
       --synchronize-each-layer \
       --contigious-checkpointing

## ZeRO3_ds_pretrain_gpt2.sh
# microsoft/DeepSpeedExamples at 88dbea61 (2023),
# training/megatron/Megatron-LM-v1.1.5-ZeRO3/examples/ds_pretrain_gpt2.sh: the line that it runs
deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt2.py \
       --model-parallel-size 4 \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --batch-size 9 \
       --train-iters 320000 \
       --lr-decay-iters 320000 \
       --save checkpoints/gpt2_345m_ds \
       --load checkpoints/gpt2_345m_ds \
       --data-path /data/megatron-data/indexed/my-gpt2_text_document \
       --vocab-file /data/megatron-data/gpt2-vocab.json \
       --merge-file /data/megatron-data/gpt2-merges.txt \
       --data-impl mmap \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 1.5e-4 \
       --lr-decay-style cosine \
       --min-lr 1.0e-5 \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --warmup 0.01 \
       --checkpoint-activations \
       --log-interval 100 \
       --save-interval 10000 \
       --eval-interval 1000 \
       --eval-iters 10 \
       --fp16 \
       --tensorboard-dir tensorboard_data/24l_1024h_1n_8g_4mp_9b_ds4 \
       --deepspeed \
       --deepspeed_config ./ds_zero_stage_2_config.json \
       --zero-stage 0 \
       --zero-reduce-bucket-size 50000000 \
       --zero-allgather-bucket-size 5000000000 \
       --zero-contigious-gradients \
       --zero-reduce-scatter \
       --checkpoint-activations \
       --checkpoint-num-layers 1 \
       --partition-activations \
       --synchronize-each-layer \
       --contigious-checkpointing

## ds_pretrain_gpt2.sh
# microsoft/DeepSpeedExamples at 9e2c735f (2020), Megatron-LM/scripts/ds_pretrain_gpt2.sh: the line that it runs
deepspeed --num_nodes 1 --num_gpus 1 pretrain_gpt2.py \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --batch-size 8 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --train-iters 320000 \
       --save checkpoints/gpt2_345m \
       --load checkpoints/gpt2_345m \
       --resume-dataloader \
       --train-data webtext \
       --lazy-loader \
       --tokenizer-type GPT2BPETokenizer \
       --cache-dir cache \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 0.00015 \
       --lr-decay-style cosine \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --warmup .01 \
       --checkpoint-activations \
       --fp16 \
       --local_rank 0 \
       --deepspeed \
       --deepspeed_config ./ds_config.json

## ds_pretrain_gpt2_model_parallel.sh
# microsoft/DeepSpeedExamples at 9e2c735f (2020), Megatron-LM/scripts/ds_pretrain_gpt2_model_parallel.sh: the line that it runs
deepspeed --num_nodes 1 --num_gpus 16 pretrain_gpt2.py \
       --model-parallel-size 1 \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --batch-size 8 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --train-iters 100000 \
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
       --fp16 \
       --deepspeed \
       --deepspeed_config ./ds_config.json

## ds_zero-offload_10B_pretrain_gpt2_model_parallel.sh
# microsoft/DeepSpeedExamples at 88dbea61 (2023),
# training/megatron/Megatron-LM/scripts/ds_zero-offload_10B_pretrain_gpt2_model_parallel.sh: the line that it runs
deepspeed --num_nodes 1 --num_gpus 1 pretrain_gpt2.py \
       --model-parallel-size 1 \
       --num-layers 50 \
       --hidden-size 4096 \
       --num-attention-heads 32 \
       --batch-size 10 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --train-iters 100 \
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
       --log-interval 1 \
       --deepspeed \
       --deepspeed_config ./ds_zero-offload_10B_config.json

## ds_zero-offload_pretrain_gpt2_model_parallel.sh
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

## ds_zero2_pretrain_gpt2_model_parallel.sh
# microsoft/DeepSpeedExamples at ece5e0e0 (2020), Megatron-LM/scripts/ds_zero2_pretrain_gpt2_model_parallel.sh
MP_SIZE=4

NUM_WORKERS=1
NUM_GPUS_PER_WORKER=16

script_dir=.

config_json="$script_dir/ds_zero2_config.json"
gpt_options=" \
       --model-parallel-size ${MP_SIZE} \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --batch-size 8 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --train-iters 100000 \
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
"
gpt_options="${gpt_options}
               --deepspeed \
               --deepspeed_config ${config_json} \
"

deepspeed --num_nodes ${NUM_WORKERS} --num_gpus ${NUM_GPUS_PER_WORKER} pretrain_gpt2.py ${gpt_options}

## generate_text.sh
# NVIDIA/Megatron-LM at 72c5f666b9 (2019), scripts/generate_text.sh
CHECKPOINT_PATH=checkpoints/gpt2_345m/
MPSIZE=1
NLAYERS=12
NHIDDEN=768
NATT=12
MAXSEQLEN=1024

TEMP=0.9
TOPK=0
TOPP=0

python generate_samples.py \
       --model-parallel-size $MPSIZE \
       --num-layers $NLAYERS \
       --hidden-size $NHIDDEN \
       --load $CHECKPOINT_PATH \
       --num-attention-heads $NATT \
       --max-position-embeddings 1024 \
       --tokenizer-type GPT2BPETokenizer \
       --fp16 \
       --cache-dir cache \
       --out-seq-length $MAXSEQLEN \
       --temperature $TEMP \
       --top_k $TOPK \
       --genfile dbg_unconditional.json \
       --num-samples 10 \
       --top_p $TOPP \
       --recompute

## pretrain_gpt2.sh
# NVIDIA/Megatron-LM at 72c5f666b9 (2019), scripts/pretrain_gpt2.sh
RANK=0
WORLD_SIZE=1

python pretrain_gpt2.py \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --batch-size 8 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --train-iters 320000 \
       --save checkpoints/gpt2_345m \
       --load checkpoints/gpt2_345m \
       --resume-dataloader \
       --train-data wikipedia \
       --lazy-loader \
       --tokenizer-type GPT2BPETokenizer \
       --cache-dir cache \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 0.00015 \
       --lr-decay-style cosine \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --warmup .01 \
       --checkpoint-activations \
       --fp16

## pretrain_gpt2_distributed.sh
# NVIDIA/Megatron-LM at 72c5f666b9 (2019), scripts/pretrain_gpt2_distributed.sh
GPUS_PER_NODE=8
MASTER_ADDR=localhost
MASTER_PORT=6000
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))

DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"

python -m torch.distributed.launch $DISTRIBUTED_ARGS \
       pretrain_gpt2.py \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --batch-size 8 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --train-iters 320000 \
       --save checkpoints/gpt2_345m \
       --load checkpoints/gpt2_345m \
       --resume-dataloader \
       --train-data wikipedia \
       --lazy-loader \
       --tokenizer-type GPT2BPETokenizer \
       --cache-dir cache \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 0.00015 \
       --lr-decay-style cosine \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --warmup .01 \
       --checkpoint-activations \
       --fp16

## pretrain_gpt2_model_parallel.sh
# microsoft/DeepSpeedExamples at ece5e0e0 (2020), Megatron-LM/scripts/pretrain_gpt2_model_parallel.sh
GPUS_PER_NODE=8
MASTER_ADDR=localhost
MASTER_PORT=6000
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))

DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"

python -m torch.distributed.launch $DISTRIBUTED_ARGS \
       pretrain_gpt2.py \
       --model-parallel-size 2 \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --batch-size 8 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --train-iters 320000 \
       --save checkpoints/gpt2_345m_mp2 \
       --load checkpoints/gpt2_345m_mp2 \
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
       --fp16 \
       --deepspeed

## train_gpt3_175b_distributed.sh
# NVIDIA/Megatron-LM at d98e8a64dd (2026), examples/gpt3/train_gpt3_175b_distributed.sh
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
MASTER_ADDR=localhost
MASTER_PORT=29500
NUM_NODES=1
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

CHECKPOINT_PATH=$1
TENSORBOARD_LOGS_PATH=$2
VOCAB_FILE=$3
MERGE_FILE=$4
DATA_PATH=$5

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE 
    --nnodes $NUM_NODES 
    --master_addr $MASTER_ADDR 
    --master_port $MASTER_PORT
)

GPT_MODEL_ARGS=(
    --num-layers 96 
    --hidden-size 12288 
    --num-attention-heads 96 
    --seq-length 2048 
    --max-position-embeddings 2048 
    --attention-backend auto
)

TRAINING_ARGS=(
    --micro-batch-size 1 
    --global-batch-size 1536
    --step-batch-size-schedule "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
    --train-iters 500000
    --weight-decay 0.1 
    --adam-beta1 0.9 
    --adam-beta2 0.95 
    --init-method-std 0.006 
    --clip-grad 1.0 
    --fp16
    --lr 6.0e-5 
    --lr-decay-style cosine 
    --min-lr 6.0e-6
    --lr-warmup-fraction .001 
    --lr-decay-iters 430000 
)

MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8 
	--pipeline-model-parallel-size 16 
)

DATA_ARGS=(
    --data-path $DATA_PATH 
    --vocab-file $VOCAB_FILE 
    --merge-file $MERGE_FILE 
    --split 949,50,1
)

EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000 
    --eval-interval 1000 
    --save $CHECKPOINT_PATH 
    --load $CHECKPOINT_PATH 
    --eval-iters 10
    --tensorboard-dir $TENSORBOARD_LOGS_PATH 
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    ${DATA_ARGS[@]} \
    ${EVAL_AND_LOGGING_ARGS[@]}

## v1_generate_text.sh
# NVIDIA/Megatron-LM at v1.0 (2020), examples/generate_text.sh
CHECKPOINT_PATH=checkpoints/gpt2_345m
VOCAB_FILE=gpt2-vocab.json
MERGE_FILE=gpt2-merges.txt

python tools/generate_samples_gpt2.py \
       --model-parallel-size 1 \
       --num-layers 24 \
       --hidden-size 1024 \
       --load $CHECKPOINT_PATH \
       --num-attention-heads 16 \
       --max-position-embeddings 1024 \
       --tokenizer-type GPT2BPETokenizer \
       --fp16 \
       --batch-size 2 \
       --seq-length 1024 \
       --out-seq-length 1024 \
       --temperature 1.0 \
       --vocab-file $VOCAB_FILE \
       --merge-file $MERGE_FILE \
       --genfile unconditional_samples.json \
       --num-samples 2 \
       --top_p 0.9 \
       --recompute

## v2_evaluate_zeroshot_gpt.sh
# NVIDIA/Megatron-LM at v2.6 (2021), examples/evaluate_zeroshot_gpt.sh, whose <lambada path> is the first parameter here
WORLD_SIZE=8

DISTRIBUTED_ARGS="--nproc_per_node $WORLD_SIZE \
                  --nnodes 1 \
                  --node_rank 0 \
                  --master_addr localhost \
                  --master_port 6000"

TASK="LAMBADA"

VALID_DATA=$1
VOCAB_FILE=gpt2-vocab.json
MERGE_FILE=gpt2-merges.txt
CHECKPOINT=checkpoints/gpt2_345m


python -m torch.distributed.launch $DISTRIBUTED_ARGS ./tasks/main.py \
               --task $TASK \
               --valid-data $VALID_DATA \
               --tokenizer-type GPT2BPETokenizer \
               --strict-lambada \
               --vocab-file $VOCAB_FILE \
               --merge-file $MERGE_FILE \
               --load $CHECKPOINT \
               --tensor-model-parallel-size 1 \
               --num-layers 24 \
               --hidden-size 1024 \
               --num-attention-heads 16 \
               --batch-size 8 \
               --activations-checkpoint-method uniform \
               --seq-length 1024 \
               --max-position-embeddings 1024 \
               --log-interval 10 \
               --fp16 \
               --no-load-optim \
               --no-load-rng
