"""Pretrain a GPT: `torchrun --nproc_per_node N pretrain_gpt.py --config FILE [--group.field VALUE ...]`.

Plain `python pretrain_gpt.py --config FILE` runs as one process. `--help` lists every field.
"""

from megapipe.config.run import PretrainConfig
from megapipe.training.command import run_program

HINT = """usage: pretrain_gpt.py --config FILE [--group.field VALUE ...]

three commands to try:
  python tools/preprocess.py --input python-stdlib --output-prefix data/stdlib --tokenizer bytes --append-eod
  python pretrain_gpt.py --config examples/gpt_tiny.yaml
  torchrun --nproc_per_node 2 pretrain_gpt.py --config examples/gpt_tiny.yaml --parallel.pipeline 2"""

if __name__ == "__main__":
    raise SystemExit(run_program(PretrainConfig, "Pretrain a GPT.", HINT))
