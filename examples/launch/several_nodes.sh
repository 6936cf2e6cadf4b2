#!/usr/bin/env bash
# Llama 2 13B on 4 nodes of 8 GPUs of 80 GB: tensor 4 x pipeline 2 x data 4. Start it on every node:
#
#   HEAD_NODE=node0 DATA=data/corpus_text_document examples/launch/several_nodes.sh [--group.field VALUE ...]
#
# HEAD_NODE is the name of one of the nodes, the same everywhere: the processes meet there, and ranks are handed out as
# they arrive. Data and run folder lie on a file system that all nodes share.
# Tensor and pipeline ranks are neighbours, so one copy of the model fills one node and only the sums of gradients cross
# the network. Predicted on the fuller GPU: 29 GB of state and 13 GB of activations.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec torchrun \
    --nnodes 4 --nproc_per_node 8 \
    --rdzv_backend c10d --rdzv_endpoint "${HEAD_NODE:?name one of the nodes}:${PORT:-29500}" --rdzv_id "${JOB:-llama2_13b}" \
    pretrain_gpt.py \
    --model examples/models/llama2_13b.yaml \
    --data.prefix "${DATA:-data/corpus_text_document}" \
    --data.sequence_length 4096 \
    --parallel.tensor 4 --parallel.pipeline 2 --parallel.data 4 \
    --schedule.name 1f1b \
    --batch.global_size 1024 --batch.micro_size 1 \
    --optimizer.learning_rate 3e-4 --optimizer.warmup_steps 2000 \
    --training.steps 500000 --training.precision bf16 \
    --training.directory "${RUN:-runs/llama2_13b}" \
    --checkpoint.every 1000 \
    --evaluation.every 1000 \
    "$@"
