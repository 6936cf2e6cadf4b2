"""Does each rank do first what later actions need?"""

import numpy as np

from megapipe.schedules.dependencies import Dependencies
from megapipe.schedules.tokens import describe
from megapipe.schedules.validation.failure import action_at, failure


def check_order(dependencies: Dependencies) -> None:
    """Raise ScheduleError at the first action that comes before something that it needs."""
    table = dependencies.table
    for needs in dependencies.local_needs():
        wrong = needs.needed > needs.row
        if wrong.any():
            index = int(np.argmax(wrong))
            needed = describe(action_at(table, int(needs.needed[index])))
            raise failure(table, int(needs.row[index]), f"it needs {needed}, which comes after it")
