#!/usr/bin/env bash
# Train a BERT from scratch on two CPU cores: a WordPiece vocabulary, a shard of sentences, a two-stage pipeline, and
# filled gaps. `make quickstart-bert` runs this script; it needs the installed package and no other file of the repository.
# Output goes to the folder runs in the current folder. The variables BERT_QUICKSTART_STEPS and BERT_QUICKSTART_FOLDER
# change the number of steps and the output folder. BIN is the folder of the program megapipe if it is not on the PATH.
set -euo pipefail

bin=${BIN:+$BIN/}
folder=${BERT_QUICKSTART_FOLDER:-runs/bert}
steps=${BERT_QUICKSTART_STEPS:-800}
export OMP_NUM_THREADS=1 # two ranks on two cores: more threads would compete for them
begin=$SECONDS

say() { printf '\n\033[1m[%4ds] %s\033[0m\n' "$((SECONDS - begin))" "$*"; }

say "1/4 learn a WordPiece vocabulary of 2048 pieces from Python's standard library"
mkdir -p "$folder"
"${bin}megapipe" preprocess train-tokenizer --input python-stdlib --type wordpiece-uncased \
    --vocabulary-size 2048 --output "$folder/tokenizer.json"

say "2/4 turn the library into a memory-mapped shard of sentences"
"${bin}megapipe" preprocess --input python-stdlib --tokenizer "$folder/tokenizer.json" --split-sentences \
    --output-prefix "$folder/corpus"

say "3/4 train a BERT as a pipeline of two ranks, $steps steps"
"${bin}megapipe" train -n 2 --config bert_quickstart \
    --data.prefix "$folder/corpus_text_sentence" --data.tokenizer "$folder/tokenizer.json" \
    --training.directory "$folder" --training.steps "$steps" --optimizer.warmup_steps $((steps / 16)) \
    --parallel.pipeline 2

say "4/4 fill in gaps"
"${bin}megapipe" fill-mask --checkpoint "$folder" --top-k 3 \
    --text "def __init__([MASK], name):" \
    --text "for i [MASK] range(len(self.items)):" \
    --text "raise TypeError('name must be a [MASK]')"

say "done"
cat <<TEXT
metrics      $folder/metrics.jsonl
loss curve   $folder/loss_curve.png
checkpoints  $folder/checkpoints

what to try next
  another text       ${bin}megapipe fill-mask --checkpoint $folder --text "import [MASK]"
  sentence order     ${bin}megapipe train -n 2 --config bert_quickstart \\
                         --data.prefix $folder/corpus_text_sentence --data.tokenizer $folder/tokenizer.json \\
                         --data.pairs order --training.directory runs/bert_order --parallel.pipeline 2
  every option       ${bin}megapipe train --kind bert --help-all
TEXT
