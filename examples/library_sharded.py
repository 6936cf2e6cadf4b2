"""Tensor parallelism and ZeRO with modules of your own: torchrun --nproc_per_node 4 examples/library_sharded.py"""

import torch
from torch import nn

from megapipe import ColumnLinear, Pipeline, RowLinear, initialize, shutdown

torch.manual_seed(0)
blocks = [nn.Sequential(ColumnLinear(64, 256), nn.GELU(), RowLinear(256, 64), nn.LayerNorm(64)) for _ in range(2)]
layers = [nn.Linear(8, 64), *blocks, nn.Linear(64, 1)]
inputs = torch.randn(256, 8)
targets = inputs.sum(1, keepdim=True).sin()

mesh = initialize({"data": 2, "tensor": 2})
rows = slice(mesh.coordinate("data"), None, 2)  # each replica trains on its own half of the batch
loss = nn.MSELoss(reduction="sum")
pipeline = Pipeline(layers, mesh, loss=loss, sample=inputs[:32], microbatches=4, zero=3)
for _ in range(60):
    for result in pipeline.step(inputs[rows], targets[rows], learning_rate=1e-3):
        if mesh.rank == 0 and result.step % 20 == 19:
            print(f"step {result.step + 1}: loss {result.loss:.4f}")
shutdown()
