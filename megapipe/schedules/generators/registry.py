"""What a generator is, and the names that they are known by."""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.generators.asynchronous import check_enough_microbatches, pipedream, two_buffered_weights
from megapipe.schedules.generators.flush import Floats, collecting, gpipe, one_forward_one_backward, warming_up
from megapipe.schedules.generators.looped import default_group_size, in_groups, interleaved_1f1b, modular
from megapipe.schedules.generators.policies import Policy, flush_policy, pipedream_policy, two_buffered_policy
from megapipe.schedules.generators.weight_halves import Times
from megapipe.schedules.generators.zero_bubble import zb_h1, zb_h2, zb_v
from megapipe.schedules.generators.zero_bubble_auto import zb_auto
from megapipe.schedules.placements import StagePlacement, linear, round_robin, v_shape
from megapipe.schedules.schedule import NumericalClass, Sections


class Options(TypedDict, total=False):
    """What else a schedule can be asked for; each generator takes those that mean something for it.

    ``chunks``: stages a rank. ``group_size``: micro-batches that pass a chunk in a row (interleaved_1f1b). ``update``:
    when 2bw steps its optimizer. ``vertical_sync``: every stage uses the version that the first one used (pipedream).
    ``two_bp``: split backwards, weight halves in idle time; ``max_pending``: the most weight halves that wait then.
    ``memory_limit``: micro-batches that a rank may hold (zb_auto). ``times``: what the order is made for (zb_auto,
    two_bp).
    """

    chunks: int
    group_size: int
    update: Literal["eager", "lazy"]
    vertical_sync: bool
    two_bp: bool
    max_pending: int
    memory_limit: float
    times: Times


TWO_BP_OPTIONS = ("two_bp", "max_pending", "times")


@dataclass(frozen=True)
class Generator:
    """A named schedule: the pure function that orders its compute actions, where its stages live, what it promises.

    ``order`` takes ``(num_ranks, num_microbatches)`` and keyword options, ``policy`` the same and says when weights
    are written. ``chunks`` is the number of stages a rank where none is asked for. ``takes_two_bp``: its backwards may
    be split; ``splits``: they always are. ``check`` raises what the schedule cannot run. ``looped``: the schedule of
    the same order with several chunks. ``settle`` fills in options whose defaults depend on the number of
    micro-batches. ``repeats``: between its first and last actions, the order is the same for every period of
    micro-batches. ``held``: a lower bound of the micro-batches that ranks hold, see
    :func:`warming_up`. ``search``: the layouts with which a planner's search tries it unasked.
    """

    name: str
    order: Callable[..., Sections]
    placement: Callable[[int, int], StagePlacement]
    numerical_class: NumericalClass
    chunks: int = 1
    takes_two_bp: bool = False
    splits: bool = False
    looped: str = ""
    search: Literal["all", "promising", "none"] = "none"
    policy: Callable[..., Policy] = flush_policy
    check: Callable[[str, int, int], None] | None = None
    settle: Callable[[int, int, Options], Options] | None = None
    repeats: bool = True
    held: Callable[[int, int, int, Options], Floats] | None = None
    order_options: tuple[str, ...] = field(init=False)
    policy_options: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order_options", _keywords(self.order))
        object.__setattr__(self, "policy_options", _keywords(self.policy))

    @property
    def summary(self) -> str:
        """First paragraph of the generator's documentation."""
        return " ".join(inspect.getdoc(self.order).split("\n\n")[0].split()).replace("``", "")  # type: ignore[union-attr]

    def check_options(self, options: Options) -> None:
        """Raise ScheduleError for an option that means nothing here."""
        known = {"chunks", *self.order_options, *self.policy_options, *(TWO_BP_OPTIONS if self.takes_two_bp else ())}
        for name in options:
            if name not in known:
                raise ScheduleError(
                    f"{self.name} does not accept the option {name!r}; it accepts {', '.join(sorted(known))}"
                )
        if ("max_pending" in options or "times" in options) and self.takes_two_bp and not options.get("two_bp", False):
            raise ScheduleError(f"{self.name} accepts 'max_pending' and 'times' only with two_bp")

    def policy_of(self, num_ranks: int, num_microbatches: int, options: Options) -> Policy:
        """Return when weights are written with these options."""
        return self.policy(num_ranks, num_microbatches, **self.arguments(self.policy_options, options))

    def settled(self, num_ranks: int, num_microbatches: int, options: Options) -> tuple[Options, int]:
        """Return the options with which an order of fewer micro-batches starts and ends like that of
        ``num_microbatches``, and the period: the number of micro-batches after which it repeats, all where it never
        does."""
        if self.settle is not None:
            options = self.settle(num_ranks, num_microbatches, options)
        if not self.repeats or options.get("two_bp", False):
            return options, num_microbatches
        group = options.get("group_size", 1)
        return options, group * -(-num_ranks // group)

    def number_of_chunks(self, options: Options) -> int:
        """Stages a rank."""
        chunks = options.get("chunks", self.chunks)
        if chunks < 1:
            raise ScheduleError(f"{self.name} needs at least 1 chunk on each rank, got {chunks}")
        return chunks

    def arguments(self, names: tuple[str, ...], options: Options) -> dict[str, Any]:
        """The options of those names that are given; the number of chunks always."""
        given: dict[str, Any] = {**options, "chunks": self.number_of_chunks(options)}
        return {name: given[name] for name in names if name in given}


def _with_group_size(num_ranks: int, num_microbatches: int, options: Options) -> Options:
    chunks = options.get("chunks", 2)
    return {"group_size": default_group_size(num_ranks, num_microbatches, chunks), **options}


def _keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


GENERATORS: dict[str, Generator] = {
    generator.name: generator
    for generator in (
        Generator("gpipe", gpipe, linear, "A", takes_two_bp=True, repeats=False, held=collecting),
        Generator(
            "1f1b",
            one_forward_one_backward,
            linear,
            "A",
            takes_two_bp=True,
            looped="interleaved_1f1b",
            held=warming_up,
            search="all",
        ),
        Generator(
            "interleaved_1f1b",
            interleaved_1f1b,
            round_robin,
            "A",
            chunks=2,
            takes_two_bp=True,
            settle=_with_group_size,
            held=in_groups,
            search="all",
        ),
        Generator(
            "pipedream",
            pipedream,
            linear,
            "B",
            policy=pipedream_policy,
            check=check_enough_microbatches,
            held=warming_up,
        ),
        Generator(
            "2bw",
            two_buffered_weights,
            linear,
            "B",
            policy=two_buffered_policy,
            check=check_enough_microbatches,
            held=warming_up,
        ),
        Generator(
            "modular",
            modular,
            round_robin,
            "A",
            chunks=2,
            takes_two_bp=True,
            repeats=False,
            held=collecting,
            search="promising",
        ),
        Generator("zb_h1", zb_h1, linear, "A", splits=True, held=warming_up, search="promising"),
        Generator("zb_h2", zb_h2, linear, "A", splits=True, held=warming_up, search="promising"),
        Generator("zb_v", zb_v, v_shape, "A", chunks=2, splits=True, search="promising"),
        Generator("zb_auto", zb_auto, linear, "A", splits=True, repeats=False),
    )
}


def find_generator(name: str) -> Generator:
    """The generator of that name; raises ScheduleError with the nearest known name."""
    if name in GENERATORS:
        return GENERATORS[name]
    if is_file_name(name):
        raise ScheduleError(
            f"unknown schedule {name!r}; to use a schedule file, pass --file to megapipe schedule, or set "
            "schedule.file in a run"
        )
    nearest = difflib.get_close_matches(name, GENERATORS, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ScheduleError(f"unknown schedule {name!r}{hint} Known: {', '.join(GENERATORS)}")


def is_file_name(name: str) -> bool:
    """Return whether the name of a schedule is that of a text file: a path, or a name with a suffix."""
    return name not in GENERATORS and (Path(name).suffix != "" or len(Path(name).parts) > 1)
