"""tformer: one transformer block, three families, every design choice one config field away."""
