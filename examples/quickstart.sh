#!/usr/bin/env bash
# Train a model from scratch on two CPU cores: tokenizer, shards, a two-stage pipeline, a resume on another layout,
# a sample of text, and the model in transformers. `make quickstart` runs this script; it needs the installed package with
# its extra hf, and no other file of the repository. Output goes to the folder runs in the current folder. The variables
# QUICKSTART_STEPS and QUICKSTART_FOLDER change the number of steps and the output folder. BIN is the folder of the
# programs megapipe and python if they are not on the PATH.
set -euo pipefail

examples=$(dirname "$0")
bin=${BIN:+$BIN/}
folder=${QUICKSTART_FOLDER:-runs/quickstart}
export OMP_NUM_THREADS=1 # two ranks on two cores: more threads would compete for them
precision=$("${bin}python" -m megapipe.training.device)
case $precision in
    bf16) steps=${QUICKSTART_STEPS:-400} ;;
    *) steps=${QUICKSTART_STEPS:-200} ;; # CPUs without bf16 instructions take twice as long per step
esac
handover=$((steps - (steps > 100 ? 20 : 2))) # the step after which the second layout takes over
begin=$SECONDS

say() { printf '\n\033[1m[%4ds] %s\033[0m\n' "$((SECONDS - begin))" "$*"; }
train() { # arguments: the step to stop after, then the layout
    local stop=$1
    shift
    "${bin}megapipe" train -n 2 --config quickstart \
        --data.prefix "$folder/corpus_text_document" --training.directory "$folder" \
        --training.steps "$steps" --training.stop_at "$stop" --training.precision "$precision" \
        --optimizer.warmup_steps $((steps / 10)) "$@"
}

say "0/6 the faster precision on this machine is $precision: $steps steps"

say "1/6 learn a vocabulary of 8192 pieces from Python's standard library"
mkdir -p "$folder"
"${bin}megapipe" preprocess train-tokenizer --input python-stdlib --type sentencepiece-bpe \
    --vocabulary-size 8192 --output "$folder/tokenizer.model"

say "2/6 turn the library into a memory-mapped shard"
"${bin}megapipe" preprocess --input python-stdlib --tokenizer "$folder/tokenizer.model" --append-eod \
    --output-prefix "$folder/corpus"

say "3/6 train a GPT as a pipeline of two ranks, schedule 1f1b, to step $handover of $steps"
train "$handover" --parallel.pipeline 2

say "4/6 resume the checkpoint on another layout: two data-parallel replicas, to step $steps"
train "$steps" --parallel.data 2

say "5/6 sample from the trained model"
"${bin}megapipe" generate --checkpoint "$folder" --prompt "def " --prompt "import " \
    --max-new-tokens 96 --temperature 0.7 --top-k 40

say "6/6 export the model to a Hugging Face folder, and sample from it with transformers"
rm -rf "$folder/exported" # from an earlier run of this script; megapipe convert does not overwrite files
"${bin}megapipe" convert convert "$folder" --to hf "$folder/exported"
"${bin}python" "$examples/generate_with_transformers.py" "$folder/exported" "def "

# The schedules that can be trained. Schedules with several routes hold a model more than once, which training refuses.
schedules=$("${bin}python" -c "from megapipe.schedules import GENERATORS
print(*(name for name, generator in GENERATORS.items() if len(generator.placed(2, {}).routes) == 1))")
say "done"
cat <<TEXT
metrics      $folder/metrics.jsonl
loss curve   $folder/loss_curve.png
checkpoints  $folder/checkpoints
exported     $folder/exported

what to try next
  another prompt     ${bin}megapipe generate --checkpoint $folder --prompt "class "
  tensor parallel    ${bin}megapipe train -n 2 --config quickstart \\
                         --data.prefix $folder/corpus_text_document --training.directory runs/tensor --parallel.tensor 2
  another schedule   ${bin}megapipe train -n 2 --config quickstart \\
                         --data.prefix $folder/corpus_text_document --training.directory runs/2bw --training.steps 100 \\
                         --optimizer.learning_rate 3e-4 --parallel.pipeline 2 --schedule.name 2bw --profile.trace runs/2bw/trace
                     the schedules: $schedules
  its timeline       ${bin}megapipe schedule overlay runs/2bw/trace -o runs/2bw/timeline.html
  every option       ${bin}megapipe train --help-all
TEXT
