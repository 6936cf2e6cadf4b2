"""Any torch modules as a pipeline: torchrun --nproc_per_node 2 examples/library_pipeline.py"""

import torch
from torch import nn

from megapipe import Pipeline, initialize, shutdown

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)]
layers = [nn.Linear(8, 64), *blocks, nn.Linear(64, 1)]
inputs = torch.randn(256, 8)
targets = inputs.sum(1, keepdim=True).sin()

mesh = initialize({"pipeline": 2})
loss = nn.MSELoss(reduction="sum")
pipeline = Pipeline(layers, mesh, loss=loss, sample=inputs[:32], microbatches=8, schedule="zb_h1")
for _ in range(100):
    for result in pipeline.step(inputs, targets, learning_rate=3e-3):
        if mesh.rank == 0 and result.step % 20 == 19:
            print(f"step {result.step + 1}: loss {result.loss:.4f}")
nn.Sequential(*layers).load_state_dict(pipeline.state_dict())
shutdown()
