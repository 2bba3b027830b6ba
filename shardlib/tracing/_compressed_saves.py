"""Activations that are kept for the backward pass in fewer bits.

A named activation passes through an operation of ours, which changes nothing, until a block that is
computed again is split into what runs forward and what runs in the backward pass. There the block's
policy says whether, and how, the name is compressed:

    forward     x ---------------------------> readers        the numbers themselves
                '--> codes, which are kept
    backward            '--> decoded --------> readers        for their derivatives

So the loss is what it was, and so is every derivative but for what it reads of the decoded numbers.
"""

import functools
from typing import Any

import jax
import jax.ad_checkpoint
from jax.extend.core import Literal, Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval

from shardlib.layouts._checkpoint_policies import COMPRESSIBLE
from shardlib.layouts._remat_parts import ENCODINGS, Encoding
from shardlib.tracing._activation_codecs import Encoded

ENCODE, DECODE = "encode_activation", "decode_activation"
compressible = Primitive(COMPRESSIBLE)
"""An activation of a `name`, whose last dim may be split over so many `parts`."""


@compressible.def_impl
def _value(x: Any, **_: Any) -> Any:
    return x


@compressible.def_abstract_eval
def _shape(x: Any, **_: Any) -> Any:
    return x


def named(x: Any, name: str, parts: int = 1) -> Any:
    """An array under a name by which a `Remat` keeps it, as it is or in fewer bits.

    Its last dim may be split over so many `parts`.
    """
    x = compressible.bind(x, name=name, parts=parts)
    return jax.ad_checkpoint.checkpoint_name(x, name)


def _derivative(primals: Any, tangents: Any, **params: Any) -> Any:
    # A derivative is never compressed: only what waits for the backward pass is.
    return compressible.bind(*primals, **params), tangents[0]


def _batched(arrays: Any, dims: Any, *, name: str, parts: int) -> Any:
    (x,), (dim,) = arrays, dims
    # Blocks are along the last dim.
    return compressible.bind(jax.numpy.moveaxis(x, dim, 0), name=name, parts=parts), 0


def _split(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
    """The equations that run forward and in the backward pass, and what is kept for the latter.

    It is one of JAX's rules for policies. It returns these two equations, whether the result is
    unknown forward, whether it is there in the backward pass, and the variables that are kept.
    """
    (x,) = equation.invars
    # What the backward pass has anyway, and what is a number of the trace, is not kept for it.
    kept = [] if instantiated[0] or isinstance(x, Literal) else [x]
    # What is not known forward is computed in the backward pass as a whole.
    if unknown[0]:
        return None, equation, [True], [True], kept
    encoding = encoding_of(saveable, equation)
    if encoding is not None:
        forward, backward, codes = _compressed(equation, encoding)
        return forward, backward, [False], [True], codes
    if _is_kept(saveable(equation.primitive, x.aval, **equation.params)):
        return equation, None, [False], [False], []
    # An activation that is not kept is made again in the backward pass.
    return equation, equation, [False], [True], kept


ad.primitive_jvps[compressible] = _derivative
batching.primitive_batchers[compressible] = _batched
mlir.register_lowering(compressible, lambda context, x, **_: [x])
partial_eval.partial_eval_jaxpr_custom_rules[compressible] = _split


def _is_kept(answer: Any) -> bool:
    """Whether a policy keeps a value as it is. Some answer by objects, which are all true."""
    return answer is True or type(answer).__name__ == "SaveableType"


def encoding_of(saveable: Any, equation: Any) -> Encoding | None:
    """The encoding in which a policy keeps an activation, if any.

    A policy does not say which one it has, but answers for any. So each is asked for in turn.
    """
    (x,), params = equation.invars, equation.params
    # Policies that keep everything keep what has no encoding too.
    if _is_kept(saveable(equation.primitive, x.aval, **params)):
        return None
    for encoding in ENCODINGS:
        if _is_kept(saveable(equation.primitive, x.aval, **params, encoding=encoding)):
            return encoding
    return None


def _compressed(equation: Any, encoding: Encoding) -> tuple[Any, Any, list[Any]]:
    """The equations that encode an activation and decode it, and the codes as variables."""
    (x,), (result,) = equation.invars, equation.outvars
    _check_real(x.aval, equation.params["name"], encoding)
    form = Encoded(encoding, x.aval.shape, x.aval.dtype, equation.params["parts"])
    encode = _call(_encoder(form), x.aval)
    # The first result is the activation itself.
    codes = [Var(atom.aval) for atom in encode.outvars[1:]]
    decode = _call(_decoder(form), *[code.aval for code in codes])
    # Errors and profiles then show the line that gave the activation its name.
    place = {"source_info": equation.source_info, "ctx": equation.ctx}
    forward = encode.replace(invars=[x], outvars=[result, *codes], **place)
    return forward, decode.replace(invars=codes, outvars=[result], **place), codes


def _check_real(aval: Any, name: str, encoding: Encoding) -> None:
    """Refuse what has no real numbers.

    Rounding the number of a token makes it another token, and complex numbers have no largest.
    """
    if not jax.numpy.issubdtype(aval.dtype, jax.numpy.floating):
        raise ValueError(
            f'`Remat.compress("{encoding}", "{name}")`: the activation `{name}` is '
            f"{aval.dtype}{list(aval.shape)}, and only real numbers are compressed. Keep it as it "
            f'is, `Remat.save("{name}")`, or give it a name of its own.'
        )


def _call(function: Any, *avals: Any) -> Any:
    """The equation of a call of a function, which is jitted."""
    (equation,) = jax.make_jaxpr(function)(*avals).jaxpr.eqns
    return equation


@functools.cache
def _encoder(form: Encoded) -> Any:
    """What returns an activation as it is, and its codes.

    There is one function for each form, so that it is traced once for all layers. It returns the
    activation too, for what runs forward is to be one equation.
    """

    def encode(x: Any) -> Any:
        return x, *form.encode(x)

    encode.__name__ = f"{ENCODE}_{form.encoding}"
    return jax.jit(encode)


@functools.cache
def _decoder(form: Encoded) -> Any:
    """What makes an activation of its codes.

    By its name `_sign_checks` finds in a trace what was decoded.
    """

    def decode(*codes: Any) -> Any:
        return form.decode(codes)

    decode.__name__ = f"{DECODE}_{form.encoding}"
    return jax.jit(decode)
