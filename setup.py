"""Packaging of megapipe. Tool settings live in pyproject.toml; every dependency stands here with its reason."""

import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

RUN_TIME = [
    "torch>=2.11",  # tensors, autograd, process groups
    "numpy>=1.26",  # counter-based random numbers, schedules as int32 columns, memory-mapped shards
    "scipy>=1.15",  # least squares and global search, for fits of a machine to measurements
    "jsonargparse[signatures]>=4.40",  # typed dataclasses to YAML files, command-line overrides and --help
    "PyYAML>=6",  # configuration files
    "tokenizers>=0.20",  # Hugging Face tokenizer.json
    "sentencepiece>=0.2",  # SentencePiece models
    "protobuf>=4",  # reads a SentencePiece model's settings, for its export to Hugging Face
    "tiktoken>=0.7",  # .tiktoken vocabularies
    "gigatoken>=0.10",  # byte-level BPE many times faster than tokenizers, used where it gives the same ids
    "pyarrow>=15",  # Parquet, Arrow and zstandard input
    "datasets>=3",  # corpora by their Hugging Face name, or saved to disk
    "sentencex>=1.0.20",  # sentence splitting for BERT, rules for some 300 languages, no download
    "safetensors>=0.4",  # checkpoint files that hold tensors and nothing that runs
    "xxhash>=3.4",  # checksums of checkpoint chunks at memory speed
    "rich>=13",  # progress bar
    "matplotlib>=3.8",  # loss curve
    "tensorboard>=2.16",  # event files, where asked for
    "wandb>=0.18",  # Weights & Biases, where asked for; offline without an account
]

HUGGING_FACE = [
    "transformers>=4.50",  # runs exported models, in the quickstart; outside oracle for logits, in tests
]

DOCUMENTATION = [
    "sphinx>=8.1",  # builds the documentation site (`make docs`), with a reference from the docstrings
    "myst-parser>=5",  # its pages are Markdown, so that they can be read without it
    "furo>=2024.8",  # its look: a side bar, narrow text, wide tables
]

EXTRAS = {
    "hf": HUGGING_FACE,
    "test": [
        *HUGGING_FACE,
        *DOCUMENTATION,  # a test builds the site
        "pytest>=8",  # test runner
        "pytest-xdist>=3.6",  # runs the fast tests on two cores
        "hypothesis>=6.100",  # property tests of schedules, shapes and parsers
        'megatron-core==0.16.1; python_version < "3.14"',  # outside oracle for shards and checkpoints; none for 3.14
        "psutil>=5",  # megatron-core's checkpoint writer needs it and does not ask for it
        "playwright>=1.45",  # hovers over the interactive schedule page in a browser that the machine has
        "setuptools>=77",  # builds the source distribution and the wheel
        'triton>=3.6; platform_system == "Linux"',  # kernels interpreted on CPUs, and compiled ahead of time
        "ruff>=0.8",  # linter and formatter
        "mypy>=1.13",  # type checker
        "import-linter>=2.1",  # checks which packages import which
        "types-PyYAML>=6",  # type stubs for mypy
    ],
    "gpu": [
        "triton>=3.6",  # kernels; ships with CUDA builds of torch, named here for other builds
    ],
    "docs": DOCUMENTATION,
    "evaluation": [
        "lm-eval[hf]>=0.4.9",  # `evaluate --tasks`; not part of `test`, since it brings some forty packages
    ],
}

# Not an extra: NVIDIA's apex, whose kernels the registry can use, is built from its sources with the flags in
# docs/kernels.md; the "apex" of package indexes is another project.

EXAMPLES = ("*.yaml", "*.sh", "*.py", "launch/*", "docker/*", "models/*.yaml", "parallel/*.yaml", "recipes/*")
GUIDES = ("*.md", "migrate/*.md", "tutorials/*.md")  # `megapipe help FIELD` names those that mention a field

# Run by its path: an isolated build has neither torch nor megapipe.
CUDA_BUILD = runpy.run_path("megapipe/kernels/cuda_backend/build.py")
CUDA_LIBRARY = "megapipe.kernels.cuda_backend.libmegapipe_cuda"


class BuildCuda(build_ext):
    """Hands csrc/ to nvcc. The library has C functions alone, so its name carries no Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        CUDA_BUILD["build"]([Path(source) for source in ext.sources], Path(self.get_ext_fullpath(ext.name)))


def cuda_extensions() -> list[Extension]:
    """The library of CUDA kernels, or a line that says why it is left out."""
    reason = CUDA_BUILD["reason_to_skip"]()
    if reason is not None:
        print(f"megapipe: CUDA C++ kernels are not built: {reason}")
        return []
    sources = [str(path) for path in sorted(Path("csrc").glob("*.cu"))]
    return [Extension(CUDA_LIBRARY, sources, depends=[str(path) for path in sorted(Path("csrc").glob("*.cuh"))])]


setup(
    name="megapipe",
    version=runpy.run_path("megapipe/__init__.py")["__version__"],
    description="Pretrains GPT and BERT language models across many devices, with pipeline schedules as data.",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["pretraining", "pipeline parallelism", "tensor parallelism", "GPT", "BERT", "PyTorch"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["megapipe*"]),
    package_data={
        "megapipe": ["py.typed", *(f"examples/{files}" for files in EXAMPLES), *(f"docs/{files}" for files in GUIDES)],
        "megapipe.layout.hardware": ["presets/*.yaml"],
        "megapipe.kernels": ["measured/*.yaml"],
    },
    entry_points={"console_scripts": ["megapipe = megapipe.cli.main:start"]},
    install_requires=RUN_TIME,
    extras_require=EXTRAS,
    ext_modules=cuda_extensions(),
    cmdclass={"build_ext": BuildCuda},
)
