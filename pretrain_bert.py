"""Pretrain a BERT: `torchrun --nproc_per_node N pretrain_bert.py --config FILE [--group.field VALUE ...]`.

Plain `python pretrain_bert.py --config FILE` runs as one process. `--help` lists every field.
"""

from megapipe.config.bert import BertPretrainConfig
from megapipe.training.command import run_program

HINT = """usage: pretrain_bert.py --config FILE [--group.field VALUE ...]

BERT reads a shard that is split into sentences; examples/bert_quickstart.sh makes one in runs/bert, then:
  python pretrain_bert.py --config examples/bert_quickstart.yaml --training.directory runs/mine
  torchrun --nproc_per_node 2 pretrain_bert.py --config examples/bert_quickstart.yaml --training.directory runs/mine \\
      --parallel.pipeline 2"""

if __name__ == "__main__":
    raise SystemExit(run_program(BertPretrainConfig, "Pretrain a BERT.", HINT))
