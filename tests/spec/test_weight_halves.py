"""What waits for a weight half, beside the paper's closed form and what the layers themselves keep on their tape."""

from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.model import ModelConfig
from megapipe.spec.layers import model_layers
from tests.spec.sizes import predicted_bytes


@given(st.integers(1, 4), st.integers(1, 128), st.sampled_from([4, 8]), st.sampled_from([1, 2, 4]))
def test_a_block_equals_the_papers_formula(micro: int, sequence: int, heads: int, tensor: int) -> None:
    """arXiv 2401.10241, table 1: 32 s b h; ours adds inputs and gradients of two norms, 8 s b h, and their statistics.
    Over tensor ranks the products' own 24 s b h are shared, the residual stream's 8 are not."""
    model = ModelConfig(num_layers=1, hidden_size=16 * heads, num_heads=heads)
    kept = predicted_bytes(model, model_layers(model)[1], micro, sequence, "bf16", tensor=tensor, halves=True)
    sbh = sequence * micro * model.hidden_size
    assert kept == sbh * (24 // tensor + 8) + sbh * 8 + 2 * 8 * sequence * micro
