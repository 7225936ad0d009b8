#!/bin/bash
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
# Megatron-LM: Llama 2 70B on 64 GPUs, slower than it could be.

export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-8}
TP=8
PP=${PP:-4}
CHECKPOINTS=${1:-checkpoints}

DISTRIBUTED=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --rdzv_endpoint $MASTER_ADDR:6000
)

MODEL=(
    --use-mcore-models
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model
)

PARALLEL="--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP \
    --sequence-parallel --use-distributed-optimizer"

TRAINING=(
    --micro-batch-size 1 --global-batch-size $((32 * 4))
    --bf16
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --clip-grad 1.0
    --train-iters 50000
)

if [ -n "$WANDB_API_KEY" ]; then
    TRAINING+=(--wandb-project llama --wandb-exp-name 70b)
fi

torchrun "${DISTRIBUTED[@]}" pretrain_gpt.py \
    "${MODEL[@]}" \
    $PARALLEL "${TRAINING[@]}" \
    --data-path data/text_document --split 99,1,0 \
    --save $CHECKPOINTS --save-interval 500 --log-interval 10 2>&1 | tee train.log
