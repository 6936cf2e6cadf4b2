#!/usr/bin/env bash
# Llama 3 8B on one node of 8 GPUs of 80 GB: tensor 4 x pipeline 2.
#
#   DATA=data/corpus_text_document examples/launch/one_node.sh [--group.field VALUE ...]
#
# Weights, master weights, gradients and moments are 18 bytes a parameter in bf16: 144 GB, so one GPU cannot hold them.
# Tensor ranks exchange activations in every layer and belong on the fast links within a node; the second stage halves
# what is left. Predicted on the fuller GPU: 19 GB of state and 17 GB of activations.
set -euo pipefail
cd "$(dirname "$0")/../.."

exec torchrun --standalone --nproc_per_node 8 \
    pretrain_gpt.py \
    --model examples/models/llama3_8b.yaml \
    --data.prefix "${DATA:-data/corpus_text_document}" \
    --data.sequence_length 8192 \
    --parallel.tensor 4 --parallel.pipeline 2 \
    --schedule.name 1f1b \
    --batch.global_size 128 --batch.micro_size 1 \
    --optimizer.learning_rate 3e-4 --optimizer.warmup_steps 2000 \
    --training.steps 100000 --training.precision bf16 \
    --training.directory "${RUN:-runs/llama3_8b}" \
    --checkpoint.every 1000 \
    --evaluation.every 1000 \
    "$@"
