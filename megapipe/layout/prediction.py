"""The prediction of a run's memory and traffic, from its configuration and schedule."""

from collections.abc import Sequence
from typing import cast

from megapipe.config.mesh_shape import DIMENSIONS, MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.layout.costs import LayoutCosts
from megapipe.layout.rank import RankPrediction
from megapipe.layout.stages import VOCABULARY_ALIGNMENT, StageLayout
from megapipe.schedules import Schedule
from megapipe.spec.attention_path import attention_path
from megapipe.spec.memory import Precision


def predict_rank(
    config: PretrainConfig,
    schedule: Schedule,
    rank: int,
    *,
    device: str = "cpu",
    amx: bool = False,
    predictions: Sequence[int] | None = None,
    recomputed: Sequence[Sequence[range]] | None = None,
) -> RankPrediction:
    """What a rank of a run will hold and send.

    config: with parallel.data filled in. schedule: lowered, of this run. rank: global number. device: type of the
    ranks' devices, on which attention's path and sums of gradients depend. amx: as in `faster_path`. predictions: as
    in `RankPrediction`. recomputed: what runs again, by default as the configuration says; under offload.activations
    auto the plan's that the run has made.
    """
    shape = MeshShape({name: getattr(config.parallel, name) or 1 for name in DIMENSIONS})
    model, precision = config.model, cast(Precision, config.training.precision)
    layout = StageLayout.of(config)
    replicas = shape.group_of(rank, "data", "context")
    costs = LayoutCosts(
        config,
        layout.layers,
        shape.sizes["data"],
        attention_path(model, precision, device, config.data.sequence_length, amx),
        VOCABULARY_ALIGNMENT,
        shard=replicas.index(rank) % config.zero.num_shards(len(replicas)),
        device=device,
    )
    place = shape.coordinates(rank)["pipeline"]
    again = layout.recomputed(config.recompute) if recomputed is None else recomputed
    return RankPrediction(costs, schedule, layout.ranges, again, place, predictions, over_gloo=device == "cpu")
