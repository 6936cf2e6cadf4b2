"""Identity of a run's data: which shards, with which content, in which order and proportions.

Paths are not part of it: a shard that was moved or copied is the same shard. Large files are not read whole, since a
run has to start quickly on a shard of any size. The checksums of whole files come from the shard's manifest, and 64
pieces of each file are hashed in addition: they show a file that was exchanged under the same manifest, and identify a
shard that has none.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from megapipe.config.bert import BertDataConfig
from megapipe.config.data import DataConfig
from megapipe.data.bert_samples import vocabulary_of
from megapipe.data.checked_shards import open_shards
from megapipe.data.errors import DataError
from megapipe.data.hashed_file import sampled_checksum
from megapipe.data.manifest import read_manifest
from megapipe.data.shard_format import bin_path, idx_path

UNKNOWN_WITHOUT_MANIFEST = ("bin_checksum", "idx_checksum", "tokenizer_fingerprint")
"""Facts that only the manifest of a shard has; without one they are None and not compared."""


@dataclass(frozen=True, kw_only=True)
class ShardIdentity:
    """Facts of one shard that decide which tokens its samples hold. Two shards are the same where all facts are."""

    dtype: str
    """Token type of the .bin file, for example uint16."""
    num_documents: int
    num_sequences: int
    num_tokens: int
    bin_sample: str
    """Checksum of the .bin file's size and of 64 pieces of it; of the whole file up to 4 MiB."""
    idx_sample: str
    """The same of the .idx file."""
    bin_checksum: str | None = None
    """Checksum of the whole .bin file, as the shard's manifest has it."""
    idx_checksum: str | None = None
    tokenizer_fingerprint: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain values for JSON."""
        return asdict(self)

    def differences(self, other: "ShardIdentity") -> Iterator[tuple[str, Any, Any]]:
        """Yield every fact that differs: (its name, the value here, the value of `other`)."""
        theirs = other.as_dict()
        for name, value in self.as_dict().items():
            unknown = name in UNKNOWN_WITHOUT_MANIFEST and None in (value, theirs[name])
            if value != theirs[name] and not unknown:
                yield name, value, theirs[name]


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """Identity of all the data of a run.

    shards: in the order of the configuration, by their content. prefixes: the path of each, for messages only.
    vocabulary: hash of what BERT's samples use of their vocabulary, None for GPT. end_of_document: the token that
    fill-in-the-middle keeps at the end of documents, None without it or if no manifest names it.
    """

    prefixes: tuple[str, ...]
    shards: tuple[ShardIdentity, ...]
    vocabulary: str | None = None
    end_of_document: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which `from_dict` reads."""
        shards = [
            {"prefix": prefix, **shard.as_dict()} for prefix, shard in zip(self.prefixes, self.shards, strict=True)
        ]
        return {"shards": shards, "vocabulary": self.vocabulary, "end_of_document": self.end_of_document}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DataIdentity":
        """Read what `as_dict` wrote. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        facts = [dict(shard) for shard in values["shards"]]
        prefixes = tuple(str(shard.pop("prefix")) for shard in facts)
        vocabulary = values["vocabulary"]
        return cls(
            prefixes=prefixes,
            shards=tuple(ShardIdentity(**shard) for shard in facts),
            vocabulary=None if vocabulary is None else str(vocabulary),
            end_of_document=values["end_of_document"],
        )

    def differences(self, stored: "DataIdentity") -> list[str]:
        """Return one sentence for each shard that differs from `stored`, with the facts and both values.

        A shard is compared with the stored shard in the same place of the blend: another order is other data.
        """
        problems = []
        if len(self.shards) != len(stored.shards):
            problems.append(
                f"the run reads {len(self.shards)} shards ({', '.join(self.prefixes)}), and the checkpoint was "
                f"trained on {len(stored.shards)} ({', '.join(stored.prefixes)})"
            )
        for prefix, shard, old_prefix, old in zip(
            self.prefixes, self.shards, stored.prefixes, stored.shards, strict=False
        ):
            differing = list(shard.differences(old))
            # Other counts imply other checksums, of which one is enough.
            counted = [each for each in differing if each[0] not in _CHECKSUMS] or differing[:1]
            facts = [f"{_NAMES.get(name, name)} is {here!r} and was {was!r}" for name, here, was in counted]
            if facts:
                moved = "" if prefix == old_prefix else f" (then {old_prefix})"
                problems.append(f"shard {prefix}{moved} has changed: {', '.join(facts)}")
        if self.vocabulary != stored.vocabulary:
            problems.append(
                f"data.tokenizer has changed: the vocabulary's hash is {self.vocabulary} and was {stored.vocabulary}"
            )
        if self.end_of_document != stored.end_of_document:
            problems.append(
                f"the end-of-document token, which fill-in-the-middle does not move, is {self.end_of_document} in the "
                f"first shard's manifest and was {stored.end_of_document}"
            )
        return problems


_CHECKSUMS = ("bin_sample", "idx_sample", "bin_checksum", "idx_checksum")
_NAMES = {
    "num_documents": "the number of documents",
    "num_sequences": "the number of sequences",
    "num_tokens": "the number of tokens",
    "bin_sample": "the checksum of pieces of its .bin",
    "idx_sample": "the checksum of pieces of its .idx",
    "bin_checksum": "the checksum of its .bin",
    "idx_checksum": "the checksum of its .idx",
    "tokenizer_fingerprint": "the tokenizer's fingerprint",
}
"""Words of a message for each fact."""


def shard_identity(prefix: str | Path) -> ShardIdentity:
    """Return the identity of the shard at `prefix` (a path without .bin and .idx). Reads at most 8 MiB of it.

    Raises DataError for a shard that cannot be used.
    """
    (shard,), manifests = open_shards([prefix], vocabulary_size=None)
    try:
        samples = sampled_checksum(bin_path(prefix)), sampled_checksum(idx_path(prefix))
    except OSError as error:
        raise DataError(f"{prefix} cannot be read: {error.strerror}") from error
    manifest = manifests[0] if manifests else None
    return ShardIdentity(
        dtype=shard.dtype.name,
        num_documents=shard.num_documents,
        num_sequences=shard.num_sequences,
        num_tokens=shard.num_tokens,
        bin_sample=samples[0],
        idx_sample=samples[1],
        bin_checksum=manifest.bin_checksum if manifest else None,
        idx_checksum=manifest.idx_checksum if manifest else None,
        tokenizer_fingerprint=manifest.tokenizer_fingerprint if manifest else None,
    )


def data_identity(data: DataConfig) -> DataIdentity:
    """Return the identity of everything that a run reads: its shards in order and, for BERT, its vocabulary.

    Raises DataError for files that cannot be used.
    """
    first = read_manifest(data.prefixes[0]) if data.fim_rate else None
    return DataIdentity(
        prefixes=data.prefixes,
        shards=tuple(shard_identity(prefix) for prefix in data.prefixes),
        vocabulary=_vocabulary_hash(data) if isinstance(data, BertDataConfig) else None,
        end_of_document=None if first is None else first.end_of_document,
    )


def _vocabulary_hash(data: BertDataConfig) -> str:
    """Hash what samples use of a vocabulary: its size, its special tokens, and which pieces continue a word."""
    prefix = data.prefixes[0]  # the vocabularies of a blend are the same
    vocabulary = vocabulary_of(replace(data, prefix=prefix, blend={}), read_manifest(prefix))
    numbers = (
        vocabulary.size,
        vocabulary.padding,
        vocabulary.classification,
        vocabulary.separator,
        vocabulary.mask,
    )
    return "xxh128:" + xxhash.xxh3_128_hexdigest(f"{numbers}".encode() + vocabulary.continues.tobytes())
