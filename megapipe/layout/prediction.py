"""The prediction of a run's memory and traffic, from its configuration and schedule."""

from collections.abc import Sequence
from typing import cast

from megapipe.config.mesh_shape import DIMENSIONS, MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.rank import RankPrediction
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, StageLayout, layers_of
from megapipe.schedules import Schedule
from megapipe.spec.attention_path import attention_path
from megapipe.spec.dtypes import Precision
from megapipe.spec.parameters import LayerSpec


def layout_costs(
    config: PretrainConfig,
    *,
    device: str = "cpu",
    amx: bool = False,
    shard: int = 0,
    layers: tuple[LayerSpec, ...] | None = None,
) -> LayoutCosts:
    """Return the sizes of a run's layers on one rank. Arguments as in `predict_rank`; shard: as in `LayoutCosts`.

    parallel.data may be open; the state of units then counts one replica. layers: those of interest, by default all.
    """
    path = attention_path(
        config.model, cast(Precision, config.training.precision), device, config.data.sequence_length, amx
    )
    data = config.parallel.data or 1
    found = layers_of(config) if layers is None else layers
    return LayoutCosts(config, found, data, path, VOCABULARY_ALIGNMENT, shard=shard, device=device)


def predict_rank(
    config: PretrainConfig,
    schedule: Schedule,
    rank: int,
    *,
    device: str = "cpu",
    amx: bool = False,
    predictions: Sequence[int] | None = None,
) -> RankPrediction:
    """What a rank of a run will hold and send.

    config: with parallel.data filled in. schedule: lowered, of this run. rank: global number. device: type of the
    ranks' devices, on which attention's path and sums of gradients depend. amx: as in `faster_path`. predictions: as
    in `RankPrediction`. Blocks are recomputed as the configuration says.
    """
    shape = MeshShape({name: getattr(config.parallel, name) or 1 for name in DIMENSIONS})
    layout = StageLayout.of(config)
    replicas = shape.group_of(rank, "data", "context")
    shard = replicas.index(rank) % config.zero.num_shards(len(replicas))
    costs = layout_costs(config, device=device, amx=amx, shard=shard)
    place = shape.coordinates(rank)["pipeline"]
    again = layout.recomputed(config.recompute)
    return RankPrediction(costs, schedule, layout.ranges, again, place, predictions, over_gloo=device == "cpu")
