#!/usr/bin/env bash
# Llama 3 8B on one node of 8 A100 of 80 GB.
#
#   DATA=data/corpus_text_document examples/launch/one_node.sh [--group.field VALUE ...]
#
# Layout, written by python -m tests.docs.figures:
# The layout is the answer of megapipe plan search --model llama3_8b --data.sequence_length 8192 --devices 8
# --batch.global_size 128 --hardware a100-80 --training.precision bf16:
# data 8, ZeRO 3, micro-batch 1. Predicted: 37.0 s a step and 68.4 GB on the fullest GPU; predicted times, not
# measured with megapipe; A100-SXM4-80GB is fitted to Megatron-LM's published runs on a100-80.
set -euo pipefail

exec megapipe train -n 8 \
    --model llama3_8b \
    --data.prefix "${DATA:-data/corpus_text_document}" \
    --data.sequence_length 8192 \
    --parallel.tensor=1 --parallel.pipeline=1 --parallel.context=1 --parallel.data=8 --parallel.sequence=false \
    --schedule.name=1f1b \
    --zero.stage=3 \
    --recompute.method=none \
    --batch.global_size=128 --batch.micro_size=1 \
    --optimizer.learning_rate 3e-4 --optimizer.warmup_steps 2000 \
    --training.steps 100000 --training.precision bf16 \
    --training.directory "${RUN:-runs/llama3_8b}" \
    --checkpoint.every 1000 \
    --evaluation.every 1000 \
    "$@"
