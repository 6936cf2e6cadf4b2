"""The registry of schedules: those of this package, of installed packages, and of the running program.

::

    from megapipe.schedules import Sections, schedule

    @schedule("mine", "A")
    def mine(num_ranks: int, num_microbatches: int) -> Sections:
        ...

Every file of `megapipe/schedules/generators` is imported when a schedule is first looked up. An installed package
lists its schedules as entry points of the group ``megapipe.schedules``: the entry point has the name of the schedule,
and names the module or function that registers it; the package is imported when that schedule is first used.
"""

import difflib
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from megapipe.config.parallel import is_schedule_file
from megapipe.schedules.actions import Floats
from megapipe.schedules.building_blocks import Policy, StagePlacement, Times, flush_policy, linear
from megapipe.schedules.errors import ScheduleError
from megapipe.schedules.schedule import NumericalClass, Sections

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "megapipe.schedules"
BUILT_IN = "megapipe.schedules.generators"
TWO_BP_OPTIONS = ("two_bp", "max_pending", "times")

Order = TypeVar("Order", bound=Callable[..., Sections])


class Options(TypedDict, total=False):
    """Options of schedules; each schedule accepts those that mean something for it.

    ``chunks``: stages on each rank. ``slices``: parts of each sequence, for schedules that pass them one by one.
    ``group_size``: consecutive micro-batches that pass a chunk (interleaved_1f1b and gis). ``update``: when 2bw steps
    its optimizer. ``vertical_sync``: every stage uses the version that the first one used (pipedream). ``two_bp``:
    split backwards, weight halves in idle time; ``max_pending``: maximum number of weight halves that wait then.
    ``memory_limit``: micro-batches that a rank may hold (zb_auto and v_auto). ``times``: the times for which the
    order is made (zb_auto and those in a V; two_bp).
    """

    chunks: int
    slices: int
    group_size: int
    update: Literal["eager", "lazy"]
    vertical_sync: bool
    two_bp: bool
    max_pending: int
    memory_limit: float
    times: Times


@dataclass(frozen=True)
class Generator:
    """A named schedule: the pure function that orders its compute actions, the placement of its stages, and its
    properties.

    Calling it with the function registers it: under the name `schedule`, it is used as a decorator.

    Args:
        name: letters, digits and underscores.
        numerical_class: A for the bits of one process, B for the bits of the schedule's own serial recursion, C for
            results within a tolerance.
        placement: ``(num_ranks, chunks)`` -> the placement of the stages.
        chunks: default number of stages on each rank.
        takes_two_bp: backwards are whole, and the option ``two_bp`` may split them.
        splits: backwards come in halves.
        policy: ``(num_ranks, num_microbatches)`` and options -> when weights are written; by default, steps flush.
        check: raises ScheduleError for a name, ranks and micro-batches that the schedule cannot run.
        repeats: for the planner: between its first and last actions, the order is the same for every period of
            micro-batches, so that few of them represent all.
        settle: for the planner: fills in options whose defaults depend on the number of micro-batches.
        held: for the planner: ``(num_ranks, num_microbatches, chunks, options)`` -> a lower bound of the micro-batches
            of each chunk that ranks hold at their peak, shape [ranks, chunks].
        looped: name of the schedule that has the same order with several chunks.
        search: the layouts with which a search tries the schedule without being asked; "never" if training does not
            run it.
        paper: the paper that plans for this schedule alone.
        text: the schedule as a file for any number of ranks and micro-batches, for users to start from.

    The function, ``order``, takes ``(num_ranks, num_microbatches)`` and options by keyword, ``chunks`` among them. If
    it takes ``slices``, its rows number the slices of micro-batch k from ``k * slices`` on (`Header.slices`). Its
    docstring explains the schedule, and its first paragraph is the summary.

    Example:
        >>> import numpy as np
        >>> from megapipe import build, rank_costs, schedule, simulate
        >>> from megapipe.schedules import Kind, Sections, alternate, rows_of
        >>> @schedule("one_at_a_time", "A")
        ... def one_at_a_time(num_ranks, num_microbatches):
        ...     '''Run each micro-batch forward and backward before the next one.'''
        ...     order = np.arange(num_microbatches)
        ...     rows = lambda kind, rank: rows_of(kind, rank, order)
        ...     ranks = range(num_ranks)
        ...     return Sections.flushing(
        ...         tuple(alternate(rows(Kind.FORWARD, rank), rows(Kind.BACKWARD, rank), warmup=0) for rank in ranks)
        ...     )
        >>> lowered = build("one_at_a_time", num_ranks=2, num_microbatches=4)
        >>> simulate(lowered, rank_costs(lowered.header)).bubble
        1.0
    """

    name: str
    numerical_class: NumericalClass
    placement: Callable[[int, int], StagePlacement] = linear
    chunks: int = 1
    takes_two_bp: bool = False
    splits: bool = False
    policy: Callable[..., Policy] = flush_policy
    check: Callable[[str, int, int], None] | None = None
    repeats: bool = False
    settle: "Callable[[int, int, Options], Options] | None" = None
    held: Callable[[int, int, int, Options], Floats] | None = None
    looped: str = ""
    search: Literal["all", "promising", "none", "never"] = "none"
    paper: str = ""
    text: str = ""
    order: Callable[..., Sections] = field(init=False)

    def __call__(self, order: Order) -> Order:
        """Register the schedule with this order, and return the function unchanged. Raises ScheduleError."""
        object.__setattr__(self, "order", order)
        GENERATORS.add(self)
        return order

    @property
    def source(self) -> str:
        """Module and function of the order."""
        return f"{self.order.__module__}.{self.order.__qualname__}"

    @property
    def built_in(self) -> bool:
        """Whether the schedule is one of this package."""
        return self.order.__module__.startswith(f"{BUILT_IN}.")

    @property
    def order_options(self) -> tuple[str, ...]:
        """Options that the order takes."""
        return _keywords(self.order)

    @property
    def summary(self) -> str:
        """First paragraph of the order's documentation."""
        return " ".join((inspect.getdoc(self.order) or "").split("\n\n")[0].split()).replace("``", "")

    def check_options(self, options: Options) -> None:
        """Raise ScheduleError for an option that this schedule does not take."""
        two_bp = TWO_BP_OPTIONS if self.takes_two_bp else ()
        allowed = {"chunks", *self.order_options, *_keywords(self.policy), *two_bp}
        for name in options:
            if name not in allowed:
                raise ScheduleError(
                    f"{self.name} does not accept the option {name!r}; it accepts {', '.join(sorted(allowed))}"
                )
        if ("max_pending" in options or "times" in options) and self.takes_two_bp and not options.get("two_bp", False):
            raise ScheduleError(f"{self.name} accepts 'max_pending' and 'times' only with two_bp")

    def policy_of(self, num_ranks: int, num_microbatches: int, options: Options) -> Policy:
        """Return when weights are written with these options."""
        return self.policy(num_ranks, num_microbatches, **self.arguments(_keywords(self.policy), options))

    def settled(self, num_ranks: int, num_microbatches: int, options: Options) -> tuple[Options, int]:
        """Return the options with which an order of fewer micro-batches starts and ends like that of
        ``num_microbatches``, and the period: the number of micro-batches after which it repeats, or all if it never
        repeats."""
        if self.settle is not None:
            options = self.settle(num_ranks, num_microbatches, options)
        if not self.repeats or options.get("two_bp", False):
            return options, num_microbatches
        group = options.get("group_size", 1)
        return options, group * -(-num_ranks // group)

    def number_of_chunks(self, options: Options) -> int:
        """Return the number of stages on each rank."""
        chunks = options.get("chunks", self.chunks)
        if chunks < 1:
            raise ScheduleError(f"{self.name} needs at least 1 chunk on each rank, got {chunks}")
        return chunks

    def number_of_slices(self, options: Options) -> int:
        """Return the number of parts of each sequence, each of which passes the stages by itself."""
        if "slices" not in self.order_options:
            return 1
        default: int = inspect.signature(self.order).parameters["slices"].default
        slices = options.get("slices", default)
        if slices < 1:
            raise ScheduleError(f"{self.name} needs at least 1 slice of each sequence, got {slices}")
        return slices

    def placed(self, num_ranks: int, options: Options) -> StagePlacement:
        """Return the placement of the stages. Raises ScheduleError for a wrong number of chunks."""
        return self.placement(num_ranks, self.number_of_chunks(options))

    def arguments(self, names: tuple[str, ...], options: Options) -> dict[str, Any]:
        """Return the given options that have one of the names; the number of chunks is always given."""
        values: dict[str, Any] = {**options, "chunks": self.number_of_chunks(options)}
        return {name: values[name] for name in names if name in values}


schedule = Generator
"""Decorator that registers a schedule: `@schedule("mine", "A")`; see `Generator` for its arguments."""


@cache
def _keywords(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


class ScheduleRegistry(Mapping[str, Generator]):
    """All schedules by name, sorted. Looking up a schedule of a package imports the package."""

    def __init__(self) -> None:
        self._registered: dict[str, Generator] = {}
        self._entry_points: dict[str, list[EntryPoint]] | None = None

    def add(self, generator: Generator) -> None:
        """Register a schedule. Raises ScheduleError for a bad name, or one that other code has registered.

        The same function may be registered again, as it is where its module is reloaded or a notebook's cell rerun.
        """
        if not re.fullmatch(r"\w+", generator.name):
            raise ScheduleError(
                f"{generator.source} registers the schedule {generator.name!r}; "
                "use only letters, digits and underscores in the name"
            )
        if generator.numerical_class not in ("A", "B", "C"):
            raise ScheduleError(
                f"{generator.source} registers the schedule {generator.name} with class "
                f"{generator.numerical_class!r}; use A, B or C"
            )
        existing = self._registered.get(generator.name)
        if existing is not None and _definition(existing) != _definition(generator):
            raise ScheduleError(
                f"schedule {generator.name!r} is registered twice, by {existing.source} "
                f"and by {generator.source}; rename one of them, or uninstall its package"
            )
        self._registered[generator.name] = generator

    def registered(self) -> list[Generator]:
        """Return the schedules that are registered already, without importing packages for others."""
        self._discovered()
        return list(self._registered.values())

    def loadable(self) -> tuple[list[Generator], list[ScheduleError]]:
        """Return the schedules that can be used, and the errors of packages whose schedules cannot be loaded."""
        generators, errors = [], []
        for name in self:
            try:
                generators.append(self[name])
            except ScheduleError as error:
                errors.append(error)
        return generators, errors

    def __getitem__(self, name: str) -> Generator:
        entry_points = self._discovered()
        for each in entry_points.get(name, ()):
            package = each.dist.name if each.dist is not None else each.value
            try:
                each.load()
            except Exception as error:
                raise ScheduleError(
                    f"schedule {name!r} of the package {package} "
                    f"cannot be loaded ({each.value}): {type(error).__name__}: "
                    f"{' '.join(str(error).split())}; fix or uninstall the package"
                ) from error
            if name not in self._registered:
                raise ScheduleError(
                    f"the package {package} names {each.value} as the schedule {name!r}, but that does not register "
                    f'it; add @schedule("{name}", ...) there, or fix or uninstall the package'
                )
        entry_points.pop(name, None)
        return self._registered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._discovered().keys() | self._registered.keys()))

    def __len__(self) -> int:
        return len(self._discovered().keys() | self._registered.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._discovered() or name in self._registered

    def _discovered(self) -> "dict[str, list[EntryPoint]]":
        """Import the built-in schedules at the first call, and return the entry points that are not loaded yet."""
        if self._entry_points is None:
            from importlib.metadata import entry_points  # takes long to import, and --help needs no schedule

            for module in pkgutil.iter_modules(import_module(BUILT_IN).__path__):
                if not module.name.startswith("_"):
                    import_module(f"{BUILT_IN}.{module.name}")
            by_name = defaultdict(list)
            for each in entry_points(group=GROUP):
                by_name[each.name].append(each)
            self._entry_points = dict(by_name)
        return self._entry_points


def _definition(generator: Generator) -> tuple[str, str]:
    return generator.order.__code__.co_filename, generator.order.__qualname__


GENERATORS = ScheduleRegistry()
"""All schedules by name; names of packages' schedules are known before these are imported."""


def find_generator(name: str) -> Generator:
    """Return the schedule of that name; raises ScheduleError with the nearest known name."""
    if name in GENERATORS:
        return GENERATORS[name]
    if is_schedule_file(name):
        raise ScheduleError(f"{name} is a file, but only the name of a schedule works here")
    nearest = difflib.get_close_matches(name, GENERATORS, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    raise ScheduleError(f"unknown schedule {name!r}{hint} Known: {', '.join(GENERATORS)}, or ./FILE for a file")


def searched(how: str, generators: Iterable[Generator] | None = None) -> tuple[str, ...]:
    """Return the names of the schedules, by default of all usable ones, that a planner's search tries in this way."""
    among = GENERATORS.loadable()[0] if generators is None else generators
    return tuple(sorted(each.name for each in among if each.search == how))


def find_published(paper: str) -> Generator:
    """Return the schedule that a paper plans for (:attr:`Generator.paper`)."""
    return next(each for each in GENERATORS.registered() if each.paper == paper)
