"""The sizes of ELECTRA's generator."""

from tformer.config import Model
from tformer.layers.replaced_tokens import narrowed
from tformer.layers.resolved import resolve_model


def test_a_generator_has_the_nearest_number_of_heads_and_widths_in_proportion():
    """0.35 of 8 heads are 2.8, so 3: 3/8 of every width."""
    cfg = resolve_model(Model(emb_dim=64, mlp_dim=160, num_heads=8, generator_fraction=0.35))
    small = narrowed(cfg)
    assert (small.num_heads, small.emb_dim, small.mlp_dim, small.head_dim) == (3, 24, 60, 8)
    assert small.embedding_factor_dim == 64
