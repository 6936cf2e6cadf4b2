"""Sequence parallelism for a rank's stages: layers work on shards of the tokens, states know what to sum for it."""

from collections.abc import Mapping

from torch import nn

from megapipe.engine.stage import Stage
from megapipe.layers.sequence_products import SequenceProducts
from megapipe.layers.sequence_shard import shard_sequence
from megapipe.layout.stages import StageLayout
from megapipe.parallel.groups import Group


def shard_sequences(stages: Mapping[int, Stage], layout: StageLayout, group: Group, chunks: int) -> None:
    """Let the layers of these stages share the tokens of every sample over `group`, the tensor ranks.

    chunks: see SequenceShards. The unit states learn which of their gradients are partial.
    """
    products = SequenceProducts(group, chunks)
    for stage_id, stage in stages.items():
        for unit, (index, twins) in enumerate(zip(layout.ranges[stage_id], stage.units, strict=True)):
            parameters = layout.layers[index].parameters
            for twin in twins:
                assert isinstance(twin, nn.Module)  # what a layer's builder made
                partial = shard_sequence(twin, products)
                stage.states[unit].partial = frozenset(parameters[path].name for path in partial)
