"""The tiny model of the tests; others are this one with `dataclasses.replace`."""

from burnish.models.spec import ModelSpec

TINY = ModelSpec(
    family="llama",
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_mlp=64,
    vocab_size=64,
    rms_norm_eps=1e-5,
    tied_head=True,
    max_positions=512,
)
