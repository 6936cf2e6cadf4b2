"""What megapipe data does with finished shards."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from megapipe.data.errors import DataError
from megapipe.data.index_writer import ShardWriter
from megapipe.data.indexed_dataset import IndexedDataset
from megapipe.data.manifest import ShardManifest, read_manifest
from megapipe.data.shard_format import FloatTokens, bin_path
from megapipe.data.shard_tokenizer import carry_tokenizer, tokenizer_of_shard
from megapipe.data.tokenizers import Tokenizer, open_tokenizer

_SHOWN_TOKENS = 200
_AT_ONCE = 1 << 22
_PERCENTILES = (0, 1, 10, 50, 90, 99, 100)
_BINS = 60
_ALIKE = (
    "tokenizer_fingerprint",
    "vocabulary_size",
    "end_of_document",
    "end_of_document_appended",
    "special_tokens",
    "sentences",
)
"""What shards that are joined must agree on."""


def inspect(prefix: str, samples: int, tokenizer_name: str | None, histogram: str | None) -> None:
    """Prints counts, percentiles of document lengths and evenly spaced documents; draws the lengths to a file."""
    dataset, manifest = IndexedDataset(prefix), read_manifest(prefix)
    print(f"{prefix}: {counts(dataset)}")
    if manifest is not None:
        manifest.check_shard(dataset)
        for each in fields(manifest):
            value = getattr(manifest, each.name)
            if each.name == "sources" and value is not None:
                value = f"{value['num_files']:,} files, {value['num_bytes']:,} bytes, {value['checksum']}"
            if value is not None:
                print(f"  {each.name}: {value}")
    lengths = document_lengths(dataset)
    if len(lengths):
        values = np.percentile(lengths, _PERCENTILES)
        shown = ", ".join(f"{share}% {value:,.0f}" for share, value in zip(_PERCENTILES, values, strict=True))
        print(f"  tokens per document: mean {lengths.mean():,.1f}; percentiles {shown}")
    tokenizer = _tokenizer_of(tokenizer_name, prefix, manifest) if samples else None
    for document in sorted({dataset.num_documents * n // max(samples, 1) for n in range(samples)}):
        if document < dataset.num_documents:
            print(f"document {document} ({lengths[document]:,} tokens): {_shown(dataset, document, tokenizer)}")
    if histogram is not None:
        _draw_lengths(lengths, prefix, histogram)


def verify(prefix: str) -> str:
    """Reads the whole shard; returns its counts. Raises DataError that says what is wrong.

    Checked are: sizes of both files, offsets being the running sum of lengths, order of the document boundaries, token
    ids below the manifest's vocabulary size, end-of-document tokens, counts and checksums of the manifest.
    """
    dataset, manifest = IndexedDataset(prefix), read_manifest(prefix)
    offset = 0
    for begin in range(0, dataset.num_sequences, _AT_ONCE):
        lengths = dataset.sequence_lengths[begin : begin + _AT_ONCE].astype(np.int64)
        if (lengths < 0).any():
            raise DataError(
                f"{prefix}.idx is damaged: sequence {begin + int(np.argmax(lengths < 0))} has a negative length"
            )
        ends = offset + np.cumsum(lengths) * dataset.dtype.itemsize
        wrong = dataset.sequence_offsets[begin : begin + _AT_ONCE] != ends - lengths * dataset.dtype.itemsize
        if wrong.any():
            raise DataError(
                f"{prefix}.idx is damaged: sequence {begin + int(np.argmax(wrong))} does not follow the previous one"
            )
        offset = int(ends[-1])
    for begin in range(0, dataset.num_documents, _AT_ONCE):
        steps = np.diff(dataset.document_indices[begin : begin + _AT_ONCE + 1])
        if (steps < 0).any():
            raise DataError(
                f"{prefix}.idx is damaged: document {begin + int(np.argmax(steps < 0))} ends before it starts"
            )
    if manifest is None:
        return f"{counts(dataset)}; sound, but without a manifest the tokens cannot be checked"
    manifest.check_shard(dataset)
    for begin in range(0, dataset.num_tokens, _AT_ONCE):
        tokens = dataset.tokens[begin : begin + _AT_ONCE]
        if tokens.min() < 0 or tokens.max() >= manifest.vocabulary_size:
            bad = int(np.argmax((tokens < 0) | (tokens >= manifest.vocabulary_size)))
            raise DataError(
                f"{prefix}.bin holds token {tokens[bad]} at position {begin + bad}, but the vocabulary has "
                f"{manifest.vocabulary_size} ids: the shard or its manifest is damaged; preprocess again"
            )
    if manifest.end_of_document_appended:
        _check_ends(dataset, manifest)
    manifest.check_checksums(prefix)
    checked = "checksums right" if manifest.bin_checksum else "sound; its manifest has no checksums"
    return f"{counts(dataset)}; {checked}"


def merge(prefixes: Sequence[str], output: str, float_tokens: FloatTokens | None = None) -> str:
    """Writes one shard of all documents in order; returns its counts. Tokens that are floats become int32.

    float_tokens: which floats the dtype codes 6 and 7 stand for.

    Raises DataError when the shards' types or manifests do not fit each other, before anything is written.
    """
    datasets = [IndexedDataset(prefix, float_tokens) for prefix in prefixes]
    manifests = [read_manifest(prefix) for prefix in prefixes]
    if Path(output).resolve() in {Path(prefix).resolve() for prefix in prefixes}:
        raise DataError(f"{output} is one of the shards to merge; name another --output-prefix")
    for dataset, manifest in zip(datasets, manifests, strict=True):
        if dataset.dtype != datasets[0].dtype:
            raise DataError(
                f"{dataset.prefix} has tokens of type {dataset.dtype}, but {prefixes[0]} has {datasets[0].dtype}; "
                "only shards of the same type can be merged"
            )
        if manifest is not None:
            manifest.check_shard(dataset)
    described = _joined_manifest(manifests, prefixes, datasets)
    floats = datasets[0].dtype.kind == "f"
    with ShardWriter(output, np.dtype("<i4") if floats else datasets[0].dtype) as writer:
        for dataset in datasets:
            if floats:
                _append_whole_numbers(writer, dataset)
            else:
                writer.append_shard(dataset.prefix)
        writer.commit(described and carry_tokenizer(described, prefixes[0], output))
    return counts(IndexedDataset(output))


def split(prefix: str, shares: str, output: str) -> Iterator[str]:
    """Writes `<output>_0`, `<output>_1`, ...: consecutive documents of one shard, by shares; yields a line each."""
    try:
        parts = np.array([float(share) for share in shares.split(",")])
    except ValueError as error:
        raise DataError(f"--shares {shares!r} is not a list of numbers like 98,1,1") from error
    if not (np.isfinite(parts).all() and (parts > 0).all()):
        raise DataError(f"--shares {shares!r}: every share must be a number above 0")
    dataset, manifest = IndexedDataset(prefix), read_manifest(prefix)
    if manifest is not None:
        manifest.check_shard(dataset)
    edges = np.round(np.concatenate(([0.0], np.cumsum(parts) / parts.sum())) * dataset.num_documents).astype(np.int64)
    if (np.diff(edges) == 0).any():
        raise DataError(f"{prefix} has {dataset.num_documents} documents, too few for --shares {shares}")
    for number, (begin, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        keep = np.zeros(dataset.num_documents, dtype=bool)
        keep[begin:end] = True
        with ShardWriter(f"{output}_{number}", dataset.dtype) as writer:
            writer.append_shard(prefix, keep)
            described = _counted(manifest, writer) if manifest is not None else None
            writer.commit(described and carry_tokenizer(described, prefix, writer.prefix))
        yield f"{output}_{number}: documents {begin:,} to {end:,}, {counts(IndexedDataset(f'{output}_{number}'))}"


def _append_whole_numbers(writer: ShardWriter, dataset: IndexedDataset) -> None:
    """Documents of float tokens as integers. Raises DataError for a token that is no id."""
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
    """Return a shard's documents, sequences, tokens, token type and bytes in words."""
    return (
        f"{dataset.num_documents:,} documents, {dataset.num_sequences:,} sequences, {dataset.num_tokens:,} tokens "
        f"({dataset.dtype.name}, {bin_path(dataset.prefix).stat().st_size:,} bytes)"
    )


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Tokens of each document: int64 [num_documents]."""
    ends = np.append(dataset.sequence_offsets // dataset.dtype.itemsize, dataset.num_tokens)
    lengths: np.ndarray = np.diff(ends[dataset.document_indices])
    return lengths


def _check_ends(dataset: IndexedDataset, manifest: ShardManifest) -> None:
    lengths = document_lengths(dataset)
    last = np.cumsum(lengths)[lengths > 0] - 1
    wrong = dataset.tokens[last] != manifest.end_of_document
    if wrong.any():
        document = int(np.flatnonzero(lengths > 0)[np.argmax(wrong)])
        raise DataError(
            f"{dataset.prefix}: document {document} does not end with token {manifest.end_of_document}, but the "
            "manifest says that every document does; preprocess again"
        )


def _joined_manifest(
    manifests: Sequence[ShardManifest | None], prefixes: Sequence[str], datasets: Sequence[IndexedDataset]
) -> ShardManifest | None:
    """None where a shard has none: nothing can be promised then."""
    known = [manifest for manifest in manifests if manifest is not None]
    if len(known) < len(manifests):
        return None
    for prefix, manifest in zip(prefixes, known, strict=True):
        for name in _ALIKE:
            if getattr(manifest, name) != getattr(known[0], name):
                raise DataError(
                    f"{prefix} and {prefixes[0]} differ in {name} ({getattr(manifest, name)}, "
                    f"{getattr(known[0], name)}): one shard cannot have both; preprocess them with the same settings"
                )
    return replace(
        known[0],
        num_documents=sum(dataset.num_documents for dataset in datasets),
        num_sequences=sum(dataset.num_sequences for dataset in datasets),
        num_tokens=sum(dataset.num_tokens for dataset in datasets),
        num_skipped=None,
        num_special_tokens_in_text=None,
        num_duplicates=None,
        sources=None,
    )


def _counted(manifest: ShardManifest, writer: ShardWriter) -> ShardManifest:
    return replace(
        manifest,
        num_documents=writer.num_documents,
        num_sequences=writer.num_sequences,
        num_tokens=writer.num_tokens,
        num_skipped=None,
        num_special_tokens_in_text=None,
        num_duplicates=None,
        sources=None,
    )


def _tokenizer_of(name: str | None, prefix: str, manifest: ShardManifest | None) -> Tokenizer | None:
    """Return the named tokenizer or the shard's own; print a line and return None if that cannot be opened."""
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
        manifest.check_tokenizer(tokenizer.spec, tokenizer.fingerprint())
    return tokenizer


def _shown(dataset: IndexedDataset, document: int, tokenizer: Tokenizer | None) -> str:
    ids = dataset.document(document)[:_SHOWN_TOKENS].tolist()
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
    except ValueError as error:  # an unknown suffix
        raise DataError(f"--histogram {path}: {error}") from error
    print(f"  lengths of {len(positive):,} non-empty documents: {path}")
