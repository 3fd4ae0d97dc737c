"""The sizes of ELECTRA's generator."""

from tformer.config import Model
from tformer.layers.parametrization import width_factor
from tformer.layers.replaced_tokens import narrowed
from tformer.layers.resolved import resolve_model


def test_a_generator_has_the_nearest_number_of_heads_and_widths_in_proportion():
    """0.35 of 8 heads are 2.8, so 3: 3/8 of every width."""
    cfg = resolve_model(Model(emb_dim=64, mlp_dim=160, num_heads=8, generator_fraction=0.35))
    small = narrowed(cfg)
    assert (small.num_heads, small.emb_dim, small.mlp_dim, small.head_dim) == (3, 24, 60, 8)
    assert small.embedding_factor_dim == 64
    shared = narrowed(resolve_model(Model(emb_dim=48, num_heads=12, num_kv_heads=6, generator_fraction=0.25)))
    assert (shared.num_heads, shared.num_kv_heads) == (3, 1)  # 1.5 are 2, which do not divide 3


def test_a_generator_under_mup_is_as_much_wider_than_its_base_as_the_encoder():
    fields = {'parametrization': 'mup', 'base_emb_dim': 16, 'generator_fraction': 0.5}
    small = narrowed(resolve_model(Model(emb_dim=64, num_heads=4, **fields)))
    assert (small.emb_dim, small.base_emb_dim, width_factor(small)) == (32, 8, 4)
    assert narrowed(resolve_model(Model(emb_dim=64, num_heads=4))).base_emb_dim is None
