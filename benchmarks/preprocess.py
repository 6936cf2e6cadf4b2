"""Compare tools/preprocess.py with a pool with one writer (Megatron-LM's design) and datasets.map: speed and memory.

All encode the same JSON lines with the same byte-level BPE of 32,000 tokens. Each runs in a separate process, and its
time is that of the whole process. The ids of the pool and of megapipe are compared byte for byte. The last line of the
output is one JSON object.

    python benchmarks/preprocess.py --megabytes 100 --workers 1 2
    python benchmarks/preprocess.py --megabytes 20 --memory-megabytes 100 1000
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from preprocess_contest.corpus import write_corpus

ROOT = Path(__file__).parents[1]
TOOL = [sys.executable, str(ROOT / "tools" / "preprocess.py")]
PEERS = [sys.executable, str(ROOT / "benchmarks" / "preprocess_contest" / "peers.py")]
VOCABULARY = 32_000
TRAINED_ON = 20_000_000
PEER_NAMES = {"pool": "Pool.imap, tokenizers", "map": "datasets.map, tokenizers"}


def timed(command: list[str], log: Path) -> tuple[float, float]:
    """Run a command; return (seconds, peak resident MB of its largest process). Raises SystemExit if it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with log.open("w") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{log.read_text()}")
    return seconds, usage.ru_maxrss / 1024


def megapipe(corpus: Path, tokenizer: Path, workers: int, output: Path) -> list[str]:
    names = ["--input", corpus, "--tokenizer", tokenizer, "--workers", workers, "--output-prefix", output]
    return [*TOOL, *map(str, names), "--append-eod"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the corpus (100)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of processes (1 2)")
    parser.add_argument("--memory-megabytes", type=int, nargs="*", default=[], help="sizes to measure peak memory at")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="preprocess"))
    try:
        print(json.dumps(contest(folder, arguments.megabytes, arguments.workers, arguments.memory_megabytes)))
    finally:
        shutil.rmtree(folder)


def contest(folder: Path, megabytes: int, workers: list[int], memory_megabytes: list[int]) -> dict:
    corpus, tokenizer, log = folder / "corpus.jsonl", folder / "tokenizer.json", folder / "log"
    times = write_corpus(corpus, megabytes * 1_000_000)
    size = corpus.stat().st_size / 1e6
    print(f"{size:,.1f} MB, the sources taken {times} time(s)")
    training = ["--type", "byte-level-bpe", "--vocabulary-size", VOCABULARY, "--sample-bytes", TRAINED_ON]
    timed([*TOOL, "train-tokenizer", "--input", str(corpus), *map(str, training), "--output", str(tokenizer)], log)
    rates: dict[str, dict[int, float]] = {name: {} for name in ("megapipe", *PEER_NAMES.values())}
    for number in workers:
        seconds, _ = timed(megapipe(corpus, tokenizer, number, folder / "megapipe"), log)
        rates["megapipe"][number] = size / seconds
        for peer, name in PEER_NAMES.items():
            output = folder / f"{peer}_{number}"
            seconds, _ = timed([*PEERS, peer, str(corpus), str(tokenizer), str(number), str(output)], log)
            rates[name][number] = size / seconds
        same = (folder / "megapipe_text_document.bin").read_bytes() == (folder / f"pool_{number}").read_bytes()
        for name, rate in rates.items():
            print(f"{name}, {number} worker(s): {rate[number]:.1f} MB/s")
        if not same:
            raise SystemExit("the ids of megapipe and of the tokenizers library differ")
    peaks = {}
    for megabytes in memory_megabytes:
        write_corpus(corpus, megabytes * 1_000_000)
        _, peaks[megabytes] = timed(megapipe(corpus, tokenizer, 1, folder / "memory"), log)
        print(f"peak memory at {megabytes:,} MB, one worker: {peaks[megabytes]:,.0f} MB")
    return {"megabytes": size, "megabytes_per_second": rates, "same_ids": True, "peak_megabytes": peaks}


if __name__ == "__main__":
    main()
