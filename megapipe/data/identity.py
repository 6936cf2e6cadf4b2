"""Identity of a run's data: the shards, their content, their order and proportions.

Paths are not part of it: a shard that was moved or copied is the same shard. Large files are not read completely,
because a run must start quickly on a shard of any size. The checksums of whole files come from the shard's manifest.
In addition, 64 pieces of each file are hashed: this detects a file that was replaced without its manifest, and
identifies a shard without a manifest.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megapipe.config.bert import BertDataConfig
from megapipe.config.run import DataConfig
from megapipe.data import DataError
from megapipe.data.bert_samples import vocabulary_of
from megapipe.data.files import sampled_checksum
from megapipe.data.manifest import open_shard, read_manifest
from megapipe.data.shards import bin_path, idx_path

UNKNOWN_WITHOUT_MANIFEST = ("bin_checksum", "idx_checksum", "tokenizer_fingerprint")
"""Facts that only a shard's manifest contains; without one they are None and not compared."""


@dataclass(frozen=True, kw_only=True)
class ShardIdentity:
    """Facts of one shard that determine the tokens of its samples. Two shards are equal if all facts are equal."""

    dtype: str
    """Token type of the .bin file, for example uint16."""
    num_documents: int
    num_sequences: int
    num_tokens: int
    bin_sample: str
    """Checksum of the .bin file's size and of 64 pieces of the file. A file up to 4 MiB is hashed completely."""
    idx_sample: str
    """The same checksum of the .idx file."""
    bin_checksum: str | None = None
    """Checksum of the whole .bin file, from the shard's manifest."""
    idx_checksum: str | None = None
    tokenizer_fingerprint: str | None = None

    def differences(self, other: "ShardIdentity") -> Iterator[tuple[str, Any, Any]]:
        """Yield every fact that differs: (name, value here, value in `other`)."""
        other_facts = asdict(other)
        for name, value in asdict(self).items():
            unknown = name in UNKNOWN_WITHOUT_MANIFEST and None in (value, other_facts[name])
            if value != other_facts[name] and not unknown:
                yield name, value, other_facts[name]


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """Identity of all the data of a run.

    shards: in the order of the configuration, by content. prefixes: path of each shard, only for messages. vocabulary:
    hash of the properties of a vocabulary that BERT's samples use; None for GPT. end_of_document: the token that
    fill-in-the-middle keeps at the end of documents; None without fill-in-the-middle, or if no manifest names it.
    """

    prefixes: tuple[str, ...]
    shards: tuple[ShardIdentity, ...]
    vocabulary: str | None = None
    end_of_document: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which `from_dict` reads."""
        pairs = zip(self.prefixes, self.shards, strict=True)
        shards = [{"prefix": prefix, **asdict(shard)} for prefix, shard in pairs]
        return {"shards": shards, "vocabulary": self.vocabulary, "end_of_document": self.end_of_document}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DataIdentity":
        """Read the output of `as_dict`. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
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

        Shards are compared by their position in the blend, because a different order is different data.
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
            # If counts differ, the checksums differ too and are not reported. If only checksums differ, one is enough.
            shown = [each for each in differing if each[0] not in _CHECKSUMS] or differing[:1]
            facts = [f"{_NAMES.get(name, name)} is {here!r} and was {was!r}" for name, here, was in shown]
            if facts:
                moved = "" if prefix == old_prefix else f" (then {old_prefix})"
                problems.append(f"shard {prefix}{moved} has changed: {', '.join(facts)}")
        if self.vocabulary != stored.vocabulary:
            problems.append(f"data.tokenizer has changed: its hash is {self.vocabulary} and was {stored.vocabulary}")
        if self.end_of_document != stored.end_of_document:
            problems.append(
                f"the end-of-document token, which fill-in-the-middle does not move, is {self.end_of_document} in the "
                f"first manifest and was {stored.end_of_document}"
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
"""Description of each fact in messages."""


def shard_identity(prefix: str | Path) -> ShardIdentity:
    """Return the identity of the shard at `prefix` (a path without .bin and .idx). Reads at most 8 MiB of it.

    Raises DataError for a shard that cannot be used.
    """
    shard, manifest = open_shard(prefix, vocabulary_size=None)
    try:
        bin_sample, idx_sample = sampled_checksum(bin_path(prefix)), sampled_checksum(idx_path(prefix))
    except OSError as error:
        raise DataError(f"{prefix} cannot be read: {error.strerror}") from error
    manifest_facts = {} if manifest is None else {name: getattr(manifest, name) for name in UNKNOWN_WITHOUT_MANIFEST}
    return ShardIdentity(
        dtype=shard.dtype.name,
        num_documents=shard.num_documents,
        num_sequences=shard.num_sequences,
        num_tokens=shard.num_tokens,
        bin_sample=bin_sample,
        idx_sample=idx_sample,
        **manifest_facts,
    )


def data_identity(data: DataConfig) -> DataIdentity:
    """Return the identity of everything that a run reads: its shards in order and, for BERT, its vocabulary.

    Raises DataError for files that cannot be used.
    """
    manifests = map(read_manifest, data.prefixes if data.fim_rate else ())
    return DataIdentity(
        prefixes=data.prefixes,
        shards=tuple(shard_identity(prefix) for prefix in data.prefixes),
        vocabulary=_vocabulary_hash(data) if isinstance(data, BertDataConfig) else None,
        end_of_document=next((each.end_of_document for each in manifests if each is not None), None),
    )


def _vocabulary_hash(data: BertDataConfig) -> str:
    """Hash the properties of a vocabulary that samples use: its size, its special tokens, and the pieces that continue
    a word."""
    prefix = data.prefixes[0]  # all shards of a blend have the same vocabulary
    return vocabulary_of(replace(data, prefix=prefix, blend={}), read_manifest(prefix)).fingerprint
