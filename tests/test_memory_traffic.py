"""Bytes that compiled programs read and write, against programs simple enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest
from machines import devices_of

from shardlib import testing

P = jax.P
FLOATS = 2**20
BYTES = 4 * FLOATS


def moved(function, *sizes, platform="cpu", donate=()):
    mesh = jax.sharding.Mesh(devices_of(platform)[:1], ("data",))
    place = jax.NamedSharding(mesh, P())
    arrays = [jax.ShapeDtypeStruct((size,), "float32", sharding=place) for size in sizes]
    return testing.memory_traffic(jax.jit(function, donate_argnums=donate).lower(*arrays).compile())


def test_memory_traffic_of_elementwise_code_reads_and_writes_once():
    found = moved(lambda x, y: jnp.tanh(x) * y + x, FLOATS, FLOATS)
    assert (found.read, found.written, found.total) == (2 * BYTES, BYTES, 3 * BYTES)
    assert str(found) == "reads 8.0 MiB, writes 4.0 MiB"


def test_memory_traffic_counts_every_iteration_of_a_loop():
    def of(steps):
        return moved(
            lambda x: jax.lax.fori_loop(0, steps, lambda _, x: jnp.sin(x), x), FLOATS
        ).total

    assert of(6) - of(4) == pytest.approx(2 * 2 * BYTES, rel=1e-4)  # and its counter


def test_memory_traffic_counts_only_the_sliced_or_updated_part():
    assert moved(lambda x: jax.lax.dynamic_slice_in_dim(x, 5, 256) * 2, FLOATS).total <= 4 * 256 * 4
    update = lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part * 2, 5, 0)
    assert moved(update, FLOATS, 256, donate=0).total <= 8 * 256 * 4


def test_memory_traffic_counts_the_most_expensive_branch():
    def function(x, y):
        return jax.lax.cond(y[0] > 0, lambda x: jnp.sin(x) + 1, lambda x: x * 0 + 1, x)

    assert 2 * BYTES <= moved(function, FLOATS, 8).total <= 4.1 * BYTES


@pytest.mark.tpu_compiler
def test_memory_traffic_excludes_fast_memory_of_a_tpu():
    found = moved(lambda x: jnp.cumsum(x * 2).reshape(-1, 8).sum(1), 2**14, platform="v5e:2x2")
    assert found.read <= 1.1 * 4 * 2**14 and found.written <= 1.1 * 4 * 2**11


def test_memory_traffic_excludes_a_loop_that_never_runs():
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 6, lambda _, x: jnp.sin(x), x))
    compiled = loop.lower(jax.ShapeDtypeStruct((FLOATS,), "float32")).compile()
    text = compiled.as_text()
    assert '"known_trip_count":{"n":"6"}' in text
    # XLA removes a loop that it knows never to run, so its text is written here.
    never = text.replace('"known_trip_count":{"n":"6"}', '"known_trip_count":{"n":"0"}')
    difference = testing.memory_traffic(text).total - testing.memory_traffic(never).total
    assert difference == pytest.approx(6 * 2 * BYTES, rel=1e-4)
