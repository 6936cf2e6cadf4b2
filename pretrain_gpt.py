"""Pretrain a GPT: `torchrun --nproc_per_node N pretrain_gpt.py --config FILE [--group.field VALUE ...]`.

Plain `python pretrain_gpt.py --config FILE` runs as one process. `--help` lists every field.
"""

import os
import sys
import time

from megapipe.config.errors import ConfigError
from megapipe.config.load import parse_or_exit

HINT = """usage: pretrain_gpt.py --config FILE [--group.field VALUE ...]

three commands to try:
  python tools/preprocess.py --input python-stdlib --output-prefix data/stdlib --tokenizer bytes --append-eod
  python pretrain_gpt.py --config examples/gpt_tiny.yaml
  torchrun --nproc_per_node 2 pretrain_gpt.py --config examples/gpt_tiny.yaml --parallel.pipeline 2"""


def main() -> int:
    """Parse, check, train; a wrong input ends with status 2 and one line per problem."""
    config = parse_or_exit("Pretrain a GPT.", HINT)

    # Importing torch takes a second, which --help and a misspelt key need not wait for.
    from megapipe.checkpoint.errors import CheckpointError
    from megapipe.data.errors import DataError
    from megapipe.parallel.errors import LaunchError
    from megapipe.parallel.launch import LaunchEnvironment
    from megapipe.training.memory_report import OutOfMemory
    from megapipe.training.pretrain import pretrain_gpt

    try:
        return pretrain_gpt(config, LaunchEnvironment.read(os.environ))
    except (ConfigError, DataError, LaunchError, CheckpointError) as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # The ranks of a host make the same mistake: one tells of it, before torchrun ends it for another's exit.
            time.sleep(3)
            return 2
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except OutOfMemory as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
