"""The .bin/.idx shard format of Megatron-LM, little-endian, byte for byte.

`<prefix>.bin` holds the tokens back to back, nothing else. `<prefix>.idx` holds

    9 bytes   magic "MMIDIDX" and two zeros
    u64       version, 1
    u8        dtype code of the tokens
    u64       S, number of sequences
    u64       D, number of documents + 1
    i32 [S]   sequence lengths in tokens
    i64 [S]   sequence offsets in bytes, the running sum of the lengths
    i64 [D]   document boundaries as sequence numbers: the first is 0, the last is S

A document is a run of sequences (one, unless it was split into sentences); an empty document has none.
"""

import struct
from pathlib import Path
from typing import Literal

import numpy as np

from megapipe.data.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

FLOAT_CODES = (6, 7)
"""In Megatron-LM float64 and float32, in GPT-NeoX the other way round, in older versions of the first both float64."""
FloatTokens = Literal["float32", "float64"]

LARGEST_UINT16_VOCABULARY = 65_500
"""Megatron-LM writes uint16 for vocabularies below this size (not below 65,536), so its readers expect that."""


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The token type of a shard for a vocabulary: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2" if vocabulary_size < LARGEST_UINT16_VOCABULARY else "<i4")


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the tokens of the shard `prefix`."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the index of the shard `prefix`."""
    return Path(f"{prefix}.idx")


def pack_header(dtype: np.dtype, num_sequences: int, num_documents: int) -> bytes:
    """Return the first 34 bytes of an .idx file, which `parse_header` reads."""
    return HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[dtype], num_sequences, num_documents + 1)


def parse_header(path: Path, header: bytes, float_tokens: FloatTokens | None = None) -> tuple[np.dtype, int, int]:
    """(token dtype, number of sequences, number of documents) from the first 34 bytes of an .idx file.

    float_tokens: what the dtype codes 6 and 7 stand for in this file; None refuses them.

    Raises DataError for a short header, a wrong magic or version, and a dtype code that is unknown or ambiguous.
    """
    if header[: len(MAGIC)] != MAGIC[: len(header)]:
        raise DataError(
            f"{path} is not the index of a .bin/.idx shard: it begins with {header[:9]!r} instead of {MAGIC!r}; "
            "write the shard with megapipe preprocess"
        )
    if len(header) < HEADER.size:
        raise DataError(f"{path} is truncated: {len(header)} bytes, but the header alone takes {HEADER.size}; {_REDO}")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{path} has format version {version}; only version {VERSION} can be read")
    if code in FLOAT_CODES and float_tokens is None:
        raise DataError(
            f"{path} holds tokens of dtype code {code}: a float type whose meaning differs between versions of "
            f"Megatron-LM and its forks; say which it is to write the shard with integers: megapipe data merge "
            f"{path.with_suffix('')} --float-tokens float32 (or float64) --output-prefix ..."
        )
    if code not in (*DTYPE_OF_CODE, *FLOAT_CODES):
        raise DataError(f"{path} holds tokens of unknown dtype code {code}; known codes are {sorted(DTYPE_OF_CODE)}")
    if num_boundaries == 0:
        raise DataError(f"{path} has no document boundaries, not even the first; {_REDO}")
    dtype = np.dtype(float_tokens).newbyteorder("<") if code in FLOAT_CODES else DTYPE_OF_CODE[code]
    return dtype, num_sequences, num_boundaries - 1


_REDO = "the file is damaged or its writing was cut off: copy it or preprocess it again"
