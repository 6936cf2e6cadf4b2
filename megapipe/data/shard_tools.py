"""Functions of megapipe data: inspect, verify, merge and split finished shards."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from megapipe.config.field_types import real_number
from megapipe.data import DataError
from megapipe.data.manifest import ShardManifest, copy_tokenizer, open_shard, read_manifest, tokenizer_of_shard
from megapipe.data.shard_writer import ShardWriter
from megapipe.data.shards import FloatTokens, IndexedDataset, bin_path, first_outside
from megapipe.data.tokenizers import Tokenizer, open_tokenizer

_MAX_SHOWN_TOKENS = 200
_CHUNK = 1 << 22
_PERCENTILES = (0, 1, 10, 50, 90, 99, 100)
_BINS = 60
_EQUAL_FIELDS = (
    "tokenizer_fingerprint",
    "vocabulary_size",
    "end_of_document",
    "end_of_document_appended",
    "special_tokens",
    "sentences",
)
"""Fields of the manifest that must be equal in shards that are merged."""


def inspect(prefix: str, samples: int, tokenizer_name: str | None, histogram: str | None) -> None:
    """Print counts, percentiles of document lengths, and evenly spaced documents; save a histogram of the lengths to a
    file."""
    dataset, manifest = open_shard(prefix)
    lengths = document_lengths(dataset)
    if histogram is not None:
        _draw_lengths(lengths, prefix, histogram)
    print(f"{prefix}: {counts(dataset)}")
    if manifest is not None:
        for field in fields(manifest):
            value = getattr(manifest, field.name)
            if field.name == "sources" and value is not None:
                value = f"{value['num_files']:,} files, {value['num_bytes']:,} bytes, {value['checksum']}"
            if value is not None:
                print(f"  {field.name}: {value}")
    if len(lengths):
        values = np.percentile(lengths, _PERCENTILES)
        shown = ", ".join(f"{share}% {value:,.0f}" for share, value in zip(_PERCENTILES, values, strict=True))
        print(f"  tokens per document: mean {lengths.mean():,.1f}; percentiles {shown}")
    tokenizer = _tokenizer_of(tokenizer_name, prefix, manifest) if samples else None
    samples = min(samples, dataset.num_documents)
    for document in (dataset.num_documents * n // samples for n in range(samples)):
        print(f"document {document} ({lengths[document]:,} tokens): {_shown(dataset, document, tokenizer)}")


def verify(prefix: str) -> str:
    """Read the whole shard and return a line with its counts. Raises DataError with the first problem.

    It checks the sizes of both files, that offsets equal the running sum of lengths, the order of document boundaries,
    that token ids are below the manifest's vocabulary size, end-of-document tokens, and the manifest's counts and
    checksums.
    """
    dataset, manifest = IndexedDataset(prefix), read_manifest(prefix)
    offset = 0
    for begin in range(0, dataset.num_sequences, _CHUNK):
        lengths = dataset.sequence_lengths[begin : begin + _CHUNK].astype(np.int64)
        _check_index(prefix, lengths >= 0, begin, "sequence {} has a negative length")
        ends = offset + np.cumsum(lengths) * dataset.dtype.itemsize
        follows = dataset.sequence_offsets[begin : begin + _CHUNK] == ends - lengths * dataset.dtype.itemsize
        _check_index(prefix, follows, begin, "sequence {} does not follow the previous one")
        offset = int(ends[-1])
    for begin in range(0, dataset.num_documents, _CHUNK):
        steps = np.diff(dataset.document_indices[begin : begin + _CHUNK + 1])
        _check_index(prefix, steps >= 0, begin, "document {} ends before it starts")
    if manifest is None:
        return f"{counts(dataset)}; no problem found, but without a manifest the tokens cannot be checked"
    manifest.check_shard(dataset)
    for begin in range(0, dataset.num_tokens, _CHUNK):
        tokens = dataset.tokens[begin : begin + _CHUNK]
        if (bad := first_outside(tokens, manifest.vocabulary_size)) is not None:
            raise DataError(
                f"{prefix}.bin holds token {tokens[bad]} at position {begin + bad}, but the "
                f"vocabulary has {manifest.vocabulary_size} ids: the shard or its manifest is "
                "damaged; preprocess again"
            )
    if manifest.end_of_document_appended:
        _check_ends(dataset, manifest)
    manifest.check_checksums(prefix)
    checked = "checksums match" if manifest.bin_checksum else "no problem found; its manifest has no checksums"
    return f"{counts(dataset)}; {checked}"


def _check_index(prefix: str, right: np.ndarray, begin: int, problem: str) -> None:
    """Raise DataError for the first false entry of `right`.

    begin: position in the index of the first entry of `right`. problem: message with {} for the position.
    """
    if not right.all():
        raise DataError(f"{prefix}.idx is damaged: {problem.format(begin + int(np.argmin(right)))}")


def merge(prefixes: Sequence[str], output: str, float_tokens: FloatTokens | None = None) -> str:
    """Write one shard with all documents in order, and return a line with its counts. Float tokens become int32.

    float_tokens: meaning of the dtype codes 6 and 7.

    Raises DataError, before anything is written, if the shards' types or manifests differ.
    """
    datasets, manifests = zip(*(open_shard(each, float_tokens=float_tokens) for each in prefixes), strict=True)
    if _same_shard(output, prefixes):
        raise DataError(f"{output} is one of the shards to merge; name another --output-prefix")
    for dataset in datasets:
        if dataset.dtype != datasets[0].dtype:
            raise DataError(
                f"{dataset.prefix} has tokens of type {dataset.dtype}, but {prefixes[0]} has "
                f"{datasets[0].dtype}; only shards of the same type can be merged"
            )
    described = _joined_manifest(manifests, prefixes, datasets)
    floats = datasets[0].dtype.kind == "f"
    with ShardWriter(output, np.dtype("<i4") if floats else datasets[0].dtype) as writer:
        for dataset in datasets:
            if floats:
                _append_whole_numbers(writer, dataset)
            else:
                writer.append_shard(dataset.prefix)
        writer.commit(described and copy_tokenizer(described, prefixes[0], output))
    return counts(IndexedDataset(output))


def split(prefix: str, shares: str, output: str) -> Iterator[str]:
    """Split a shard into `<output>_0`, `<output>_1`, ... in proportion to `shares`; yield a line for each of them."""
    try:
        parts = np.array([real_number(share) for share in shares.split(",")])
    except ValueError as error:
        raise DataError(f"--shares {shares!r} is not a list of numbers like 98,1,1") from error
    if not (np.isfinite(parts).all() and (parts > 0).all()):
        raise DataError(f"--shares {shares!r}: every share must be a number above 0, as in 98,1,1")
    dataset, manifest = open_shard(prefix)
    parts /= parts.max()  # so that the sum is finite
    edges = np.round(np.concatenate(([0.0], np.cumsum(parts) / parts.sum())) * dataset.num_documents).astype(np.int64)
    if (np.diff(edges) == 0).any():
        raise DataError(
            f"{prefix} has {dataset.num_documents} documents, too few for --shares {shares}, each of which must give "
            "at least one: use fewer shares, or shares that differ less"
        )
    for number in range(len(parts)):
        if _same_shard(f"{output}_{number}", [prefix]):
            raise DataError(f"{output}_{number} is the shard to split; name another --output-prefix")
    for number, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        keep = np.zeros(dataset.num_documents, dtype=bool)
        keep[begin:end] = True
        with ShardWriter(f"{output}_{number}", dataset.dtype) as writer:
            writer.append_shard(prefix, keep)
            described = _counted(manifest, [writer]) if manifest is not None else None
            writer.commit(described and copy_tokenizer(described, prefix, writer.prefix))
        yield f"{output}_{number}: documents {begin:,} to {end - 1:,}, {counts(IndexedDataset(f'{output}_{number}'))}"


def _same_shard(output: str, prefixes: Sequence[str]) -> bool:
    """Return whether a shard with the prefix `output` would replace one of the shards, also through a link."""
    return bin_path(output).resolve() in {bin_path(prefix).resolve() for prefix in prefixes}


def _append_whole_numbers(writer: ShardWriter, dataset: IndexedDataset) -> None:
    """Append documents of float tokens as integers. Raises DataError for a token that is not an id."""
    for document in range(dataset.num_documents):
        tokens = dataset.document(document)
        wrong = ~((tokens >= 0) & (tokens < 2**31) & (tokens == np.floor(tokens)))
        if wrong.any():
            place = int(np.argmax(wrong))
            raise DataError(
                f"{dataset.prefix}.bin: token {place} of document {document} is {tokens[place]} when read as "
                f"{dataset.dtype.name}, which is not a token id; try the other float type with --float-tokens"
            )
        first, last = dataset.document_indices[document : document + 2].tolist()
        writer.add_document([dataset[sequence].astype(np.int32) for sequence in range(first, last)])


def counts(dataset: IndexedDataset) -> str:
    """Return a line with a shard's numbers of documents, sequences and tokens, its token type and its bytes."""
    return (
        f"{dataset.num_documents:,} documents, {dataset.num_sequences:,} sequences, {dataset.num_tokens:,} tokens "
        f"({dataset.dtype.name}, {bin_path(dataset.prefix).stat().st_size:,} bytes)"
    )


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Return the number of tokens of each document: int64 [num_documents]."""
    return np.diff(dataset.document_bounds(range(dataset.num_documents)))


def _check_ends(dataset: IndexedDataset, manifest: ShardManifest) -> None:
    lengths = document_lengths(dataset)
    last = np.cumsum(lengths)[lengths > 0] - 1
    wrong = dataset.tokens[last] != manifest.end_of_document
    if wrong.any():
        document = int(np.flatnonzero(lengths > 0)[np.argmax(wrong)])
        raise DataError(
            f"{dataset.prefix}: document {document} does not end with token "
            f"{manifest.end_of_document}, although the manifest says so; preprocess again"
        )


def _joined_manifest(
    manifests: Sequence[ShardManifest | None], prefixes: Sequence[str], datasets: Sequence[IndexedDataset]
) -> ShardManifest | None:
    """Return the manifest of the merged shard; None if one of the shards has no manifest."""
    present = [manifest for manifest in manifests if manifest is not None]
    if len(present) < len(manifests):
        return None
    for prefix, manifest in zip(prefixes, present, strict=True):
        for name in _EQUAL_FIELDS:
            if getattr(manifest, name) != getattr(present[0], name):
                raise DataError(
                    f"{prefix} and {prefixes[0]} differ in {name} ({getattr(manifest, name)}, "
                    f"{getattr(present[0], name)}): preprocess them with the same settings"
                )
    return _counted(present[0], datasets)


def _counted(manifest: ShardManifest, parts: Sequence[IndexedDataset | ShardWriter]) -> ShardManifest:
    """Return the manifest for a shard of these parts, without the fields that describe the input."""
    return replace(
        manifest,
        num_documents=sum(part.num_documents for part in parts),
        num_sequences=sum(part.num_sequences for part in parts),
        num_tokens=sum(part.num_tokens for part in parts),
        num_skipped=None,
        num_special_tokens_in_text=None,
        num_duplicates=None,
        sources=None,
    )


def _tokenizer_of(name: str | None, prefix: str, manifest: ShardManifest | None) -> Tokenizer | None:
    """Return the tokenizer `name`, or the shard's tokenizer. Print a line and return None if the latter cannot be
    opened."""
    if name is None and manifest is None:
        print("  no manifest: samples are shown as ids; name the shard's --tokenizer to read them")
        return None
    try:
        tokenizer = open_tokenizer(name or (tokenizer_of_shard(prefix, manifest) if manifest else ""))
    except DataError as error:
        if name is not None:
            raise
        print(f"  samples are shown as ids: {error}")
        return None
    if manifest is not None:
        manifest.check_tokenizer(tokenizer.spec, tokenizer.fingerprint)
    return tokenizer


def _shown(dataset: IndexedDataset, document: int, tokenizer: Tokenizer | None) -> str:
    ids = dataset.document(document)[:_MAX_SHOWN_TOKENS].tolist()
    return str(ids) if tokenizer is None else repr(tokenizer.decode(ids))


def _draw_lengths(lengths: np.ndarray, prefix: str, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    positive = lengths[lengths > 0]
    largest = max(int(positive.max()), 2) if len(positive) else 2
    axes.hist(positive, bins=np.geomspace(1, largest + 1, _BINS).tolist())
    axes.set(xscale="log", xlabel="tokens per document", ylabel="documents", title=Path(prefix).name)
    try:
        figure.savefig(path)
    except ValueError as error:  # the suffix is unknown
        raise DataError(f"--histogram {path}: {error}") from error
    print(f"{path}: lengths of {len(positive):,} non-empty documents")
