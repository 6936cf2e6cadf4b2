"""The same documents as a file of every format that preprocessing reads."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet

TITLES = [f"title {number}" for number in range(2500)]
TEXTS = [f"{number} naïve 東京 " + "words " * (number % 50) for number in range(2500)]
TABLE = pa.table({"id": list(range(2500)), "text": TEXTS, "title": pa.array(TITLES, pa.large_string())})


def json_lines() -> bytes:
    lines = (json.dumps({"text": text, "title": title}) for text, title in zip(TEXTS, TITLES, strict=True))
    return "\n".join(lines).encode()


def write_gzip(folder: Path) -> str:
    half = len(json_lines()) // 2  # two members, as `cat a.gz b.gz` gives
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(json_lines()[:half]) + gzip.compress(json_lines()[half:]))
    return "in.jsonl.gz"


def write_zstandard(folder: Path) -> str:
    with pa.output_stream(folder / "in.jsonl.zst", compression="zstd") as file:
        file.write(json_lines())
    return "in.jsonl.zst"


def write_parquet(folder: Path) -> str:
    pyarrow.parquet.write_table(TABLE, folder / "in.parquet", row_group_size=400)
    return "in.parquet"


def write_arrow_file(folder: Path) -> str:
    with pa.ipc.new_file(folder / "in.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=300)
    return "in.arrow"


def write_arrow_stream(folder: Path) -> str:
    with pa.ipc.new_stream(folder / "in.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=300)
    return "in.arrow"


def save_dataset(folder: Path) -> str:
    datasets.Dataset.from_dict(TABLE.to_pydict()).save_to_disk(str(folder / "saved"))
    return "saved"


def save_splits(folder: Path) -> str:
    other = datasets.Dataset.from_dict({"text": ["no"], "title": ["no"]})
    datasets.DatasetDict({"test": other, "extra": datasets.Dataset.from_dict(TABLE.to_pydict())}).save_to_disk(
        str(folder / "saved")
    )
    return f"dataset:{folder / 'saved'}@extra"


def save_chosen_rows(folder: Path) -> str:
    """Rows in reverse, turned back by an index mapping, as filter and shuffle leave one."""
    backwards = datasets.Dataset.from_dict(TABLE.take(list(range(2499, -1, -1))).to_pydict()).select(
        list(range(2499, -1, -1))
    )
    backwards.save_to_disk(str(folder / "saved"))
    return "saved"


def write_folder_of_data_files(folder: Path) -> str:
    (folder / "hub").mkdir()
    pyarrow.parquet.write_table(TABLE, folder / "hub" / "train.parquet")
    return f"dataset:{folder / 'hub'}"


FORMATS: list[Callable[[Path], str]] = [
    write_gzip,
    write_zstandard,
    write_parquet,
    write_arrow_file,
    write_arrow_stream,
    save_dataset,
    save_splits,
    save_chosen_rows,
    write_folder_of_data_files,
]
