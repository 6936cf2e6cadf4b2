#!/usr/bin/env bash
# Llama 2 13B on 4 nodes of 8 A100 of 80 GB. Start it on every node:
#
#   HEAD_NODE=node0 DATA=data/corpus_text_document examples/launch/several_nodes.sh [--group.field VALUE ...]
#
# HEAD_NODE is the name of one of the nodes, the same in every command: all nodes connect to it and get their ranks in the
# order of arrival. Data and run folder must be on a file system that all nodes share.
#
# Layout, written by python -m tests.docs.figures:
# The layout is the answer of megapipe plan search --model llama2_13b --data.sequence_length 4096 --devices 32
# --batch.global_size 1024 --hardware a100-80 --training.precision bf16:
# data 32, ZeRO 3, micro-batch 2. Predicted: 55.1 s a step and 73.1 GB on the fullest GPU; predicted times, not
# measured with megapipe; A100-SXM4-80GB is fitted to Megatron-LM's published runs on a100-80.
set -euo pipefail

exec megapipe train -n 8 --nodes 4 --rendezvous "${HEAD_NODE:?name one of the nodes}:${PORT:-29500}" \
    --model llama2_13b \
    --data.prefix "${DATA:-data/corpus_text_document}" \
    --data.sequence_length 4096 \
    --parallel.tensor=1 --parallel.pipeline=1 --parallel.context=1 --parallel.data=32 --parallel.sequence=false \
    --schedule.name=1f1b \
    --zero.stage=3 \
    --recompute.method=none \
    --batch.global_size=1024 --batch.micro_size=2 \
    --optimizer.learning_rate 3e-4 --optimizer.warmup_steps 2000 \
    --training.steps 500000 --training.precision bf16 \
    --training.directory "${RUN:-runs/llama2_13b}" \
    --checkpoint.every 1000 \
    --evaluation.every 1000 \
    "$@"
