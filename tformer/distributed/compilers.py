"""What compilers of accelerators are told about the programs of models."""

from collections.abc import Callable
from typing import Any

import jax

from tformer.distributed import sharding

# By JAX backend. On a TPU a product does not pass its operand's parts around a ring, in dozens of small products, but
# waits for all of them. On a GPU products of the same tokens are not merged into one, for which kernels would be copied
# beside each other in every step.
OPTIONS: dict[str, dict[str, Any]] = {
    'tpu': {'xla_jf_spmd_threshold_for_windowed_einsum_mib': 1_000_000},  # larger than any operand
    'gpu': {'xla_gpu_dot_merger_threshold_mb': 0},
}
# Those of the train step besides. On a GPU all matrix products use cuBLAS, which adds biases and residuals as it writes
# its results; timing Triton's kernels against it would only make compiling longer.
TRAINING = {'gpu': {'xla_gpu_enable_triton_gemm': False}}


def traced(tree: Any) -> bool:
    """Returns whether a tree has arrays of a program that is being traced."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


class Jitted:
    """A jitted function with options, of which JAX lets programs within others have none."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], keywords: dict[str, Any]) -> None:
        self._within = jax.jit(function, **keywords)
        self._alone = jax.jit(function, compiler_options=options, **keywords)
        self.lower, self.trace = self._alone.lower, self._alone.trace

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return (self._within if traced((arguments, named)) else self._alone)(*arguments, **named)


def jit(function: Callable[..., Any], platform: str | None = None, training: bool = False, **keywords: Any) -> Any:
    """Returns `jax.jit(function, **keywords)` with the options of a platform, or else of the current one."""
    platform = platform or sharding.platform()
    options = {**OPTIONS.get(platform, {}), **(TRAINING.get(platform, {}) if training else {})}
    return Jitted(function, options, keywords) if options else jax.jit(function, **keywords)
