"""The prediction of a run's memory and traffic, from its configuration and schedule."""

from collections.abc import Sequence

from megapipe.config.run import PretrainConfig
from megapipe.costs.layout import LayoutCosts
from megapipe.models.gpt_kernels import runs_unfused
from megapipe.parallel.mesh import DIMENSIONS, MeshShape
from megapipe.planner.rank import RankPrediction
from megapipe.schedules import Schedule
from megapipe.training.assemble import DTYPES, VOCABULARY_ALIGNMENT, lay_out
from megapipe.training.families import family_of
from megapipe.training.scheduling import num_stages


def predict_rank(
    config: PretrainConfig,
    schedule: Schedule,
    rank: int,
    *,
    device: str = "cpu",
    predictions: Sequence[int] | None = None,
    recomputed: Sequence[Sequence[range]] | None = None,
) -> RankPrediction:
    """What a rank of a run will hold and send.

    config: with parallel.data filled in. schedule: lowered, of this run. rank: global number. device: type of the
    ranks' devices, on which attention's path and sums of gradients depend. predictions: as in `RankPrediction`.
    recomputed: what runs again, by default as the configuration says; under offload.activations auto the plan's that
    the run has made.
    """
    shape = MeshShape({name: getattr(config.parallel, name) or 1 for name in DIMENSIONS})
    family, model, length = family_of(config), config.model, config.data.sequence_length
    layout = lay_out(
        family.layers,
        model,
        num_stages(config),
        length,
        config.parallel.layers_per_stage,
        family.predictions,
        config.recompute.logits,
    )
    unfused = runs_unfused(model, DTYPES[config.training.precision], device, length)
    replicas = next(part for part in shape.partition("data", "context") if rank in part)
    costs = LayoutCosts(
        config,
        family.layers,
        shape.sizes["data"],
        "unfused" if unfused else "sdpa",
        VOCABULARY_ALIGNMENT,
        shard=replicas.index(rank) % config.zero.num_shards(len(replicas)),
    )
    place = shape.coordinates(rank)["pipeline"]
    again = layout.recomputed(config.recompute) if recomputed is None else recomputed
    return RankPrediction(costs, schedule, layout.ranges, again, place, predictions, over_gloo=device == "cpu")
