"""Triton's kernels run in its interpreter here, too, so that both can be compared. Another process compiles PTX."""

import tests.kernels.conftest as interpreted

assert interpreted
