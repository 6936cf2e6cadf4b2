"""A family of an installed package is used like those of this one; a broken package disturbs no other."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from megapipe.spec import family
from megapipe.spec.family import FamilyError, families, family_of
from tests.docs.test_contributing import ADDITIONS
from tests.layers.bound import bind_weights, make_context, run
from tests.models.hugging_face import GROUPED, case_of_config, exported, opened

HELIUM = (ADDITIONS / "model_family.txt").read_text(encoding="utf-8").split("+++\n")[1].split("=== ")[0]
PACKAGES = {
    "helium_family": ("helium", HELIUM),
    "half_gone": ("lost", "import nothing_of_this_name"),
    "says_nothing": ("silent", ""),
    "llama_again": ("llama", HELIUM.replace('"helium"', '"llama"')),
}
"""Name of a package -> model_type of its entry point, and the source of its only module."""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Packages as pip installs them, in a folder of their own."""
    for package, (model_type, source) in PACKAGES.items():
        described = tmp_path / f"{package}-1.0.dist-info"
        described.mkdir()
        (tmp_path / f"{package}.py").write_text(source)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (described / "entry_points.txt").write_text(f"[megapipe.families]\n{model_type} = {package}\n")
    families()
    monkeypatch.setattr(family, "_FAMILIES", dict(family._FAMILIES))
    monkeypatch.syspath_prepend(tmp_path)
    family._package_errors.cache_clear()
    yield
    family._package_errors.cache_clear()
    for package in PACKAGES:
        sys.modules.pop(package, None)


def test_package_families_have_the_logits_of_transformers(packages: None) -> None:
    case = case_of_config(transformers.HeliumConfig(**GROUPED, head_dim=16, attn_implementation="eager"))
    model, weights = opened(case.theirs)
    layers = bind_weights(model, weights)
    context = make_context(model, batch=2, length=20)
    context.labels = None
    with torch.no_grad():
        expected = case.theirs(context.tokens).logits
        assert (run(layers, context) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert exported(weights, model, "helium").keys() <= case.theirs.state_dict().keys()


def test_a_broken_package_is_refused_by_its_name_alone(packages: None) -> None:
    for name, message in (
        ("lost", "of the package half_gone cannot be used: half_gone cannot be loaded: ModuleNotFoundError"),
        ("silent", "of the package says_nothing cannot be used: says_nothing does not register 'silent'"),
        ("llama", "of the package llama_again cannot be used: llama_again registers llama a second time"),
    ):
        with pytest.raises(FamilyError, match=message):
            family_of(name)
    assert family_of("mistral").model_type == "mistral"
    assert "helium" in families("gpt")
