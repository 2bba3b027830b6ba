"""What plain JAX computes wrongly on meshes. When one of these passes, the compiler was mended: see
where docs mention it.
"""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl


@pytest.mark.xfail(
    strict=True, reason="XLA's partitioner slices an operand in the wrong order of devices"
)
def test_plain_jax_matmul_on_three_mesh_axes():
    mesh = sl.make_mesh("a=2,b=2,c=2")
    left, right = np.arange(128.0).reshape(8, 16) % 7, np.arange(128.0).reshape(16, 8) % 5
    to = [NamedSharding(mesh, spec) for spec in (P("b", "c"), P("c", "b"), P("c", ("a", "b")))]
    product = jax.jit(lambda left, right: left @ right, in_shardings=to[:2], out_shardings=to[2])
    np.testing.assert_allclose(product(left, right), left @ right)


@pytest.mark.xfail(
    strict=True, reason="XLA's partitioner slices an operand in the wrong order of devices"
)
def test_plain_jax_gradient_of_a_weight_split_over_all_mesh_axes():
    mesh = sl.make_mesh("model=2,fsdp=2,data=2")
    random = np.random.default_rng(0)
    weight, x = random.normal(size=(16, 8)).astype("f"), random.normal(size=(8, 4, 16)).astype("f")
    gradient = jax.grad(lambda weight, x: ((x @ weight) ** 2).sum())
    of_weight, of_x = (
        NamedSharding(mesh, P(("fsdp", "model"), "data")),
        NamedSharding(mesh, P("data")),
    )
    split = jax.jit(gradient, in_shardings=(of_weight, of_x), out_shardings=of_weight)
    np.testing.assert_allclose(split(weight, x), gradient(weight, x), rtol=1e-4)
