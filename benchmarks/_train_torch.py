"""The models of `models/gpt.py` in PyTorch, as its users write them where speed matters, and a step
that trains them.

The same numbers as ours: products, attention and the residual stream in bfloat16, by autocast;
norms and the loss in float32; the GELU of a tanh; rotations of dims `k` and `k + K / 2`; a head
tied to the embedding. Queries, keys and values are one product. Parameters, gradients and AdamW's
moments are float32. Imported only where PyTorch is.
"""

import contextlib
import importlib
import math
import shutil
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from models.gpt_config import GPTConfig

torch: Any = importlib.import_module("torch")
attention_of: Any = importlib.import_module("torch.nn.attention")
nn, functional = torch.nn, torch.nn.functional

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


class Norm(nn.Module):
    """LayerNorm or RMSNorm, in float32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.centred = config.norm == "layer"
        self.shape = (config.width,)
        self.epsilon = config.norm_epsilon
        self.weight = nn.Parameter(torch.ones(config.width))
        self.bias = (
            nn.Parameter(torch.zeros(config.width)) if self.centred and config.bias else None
        )

    def forward(self, x: Any) -> Any:
        """Of the residual stream."""
        if self.centred:
            y = functional.layer_norm(x.float(), self.shape, self.weight, self.bias, self.epsilon)
        else:
            y = functional.rms_norm(x.float(), self.shape, self.weight, self.epsilon)
        return y.to(x.dtype)


class Attention(nn.Module):
    """Causal attention, whose keys and values may serve several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        dims = config.dims
        self.head_dim, self.heads, self.kv_heads = dims["head_dim"], dims["heads"], dims["kv_heads"]
        self.sizes = [count * self.head_dim for count in (self.heads, self.kv_heads, self.kv_heads)]
        self.qkv = nn.Linear(config.width, sum(self.sizes), bias=config.bias)
        self.output = nn.Linear(self.sizes[0], config.width, bias=config.bias)

    def forward(self, x: Any, rotation: Any) -> Any:
        """What each token makes of those up to it."""
        q, k, v = (
            y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for y in self.qkv(x).split(self.sizes, dim=-1)
        )
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        grouped = self.kv_heads < self.heads
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.output(y.transpose(1, 2).flatten(-2))


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Turn pairs of dims by their position's angle, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class MLP(nn.Module):
    """Two matrices around a GELU, or SwiGLU's three."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.dims["mlp"]
        self.up = nn.Linear(config.width, hidden, bias=config.bias)
        self.gate = (
            nn.Linear(config.width, hidden, bias=config.bias) if config.mlp == "swiglu" else None
        )
        self.down = nn.Linear(hidden, config.width, bias=config.bias)

    def forward(self, x: Any) -> Any:
        """Of the normed residual stream."""
        if self.gate is None:
            return self.down(functional.gelu(self.up(x), approximate="tanh"))
        return self.down(self.up(x) * functional.silu(self.gate(x)))


class Block(nn.Module):
    """Attention, then the MLP, each with its norm before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(config), Attention(config)
        self.mlp_norm, self.mlp = Norm(config), MLP(config)

    def forward(self, x: Any, rotation: Any) -> Any:
        """The residual stream after it."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """The decoder and its loss. It knows what the benchmark trains: norms first, a tied head, a
    GELU or SwiGLU, no dropout.
    """

    def __init__(self, config: GPTConfig, dtype: Any) -> None:
        super().__init__()
        known = config.norm_first and config.tied and config.mlp != "relu" and not config.dropout
        assert known and config.dims["vocab"] == config.vocab, config
        self.dtype = dtype
        self.embedding = nn.Embedding(config.vocab, config.width)
        learned = config.positions == "learned"
        self.positions = (
            nn.Parameter(torch.empty(config.context, config.width)) if learned else None
        )
        if not learned:
            size = config.dims["head_dim"]
            frequency = config.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
            angle = torch.arange(config.context, dtype=torch.float32)[:, None] * frequency
            self.register_buffer("cos", angle.cos())
            self.register_buffer("sin", angle.sin())
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = Norm(config)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                returning = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / (math.sqrt(2 * config.layers) if returning else 1)
                )
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Any, targets: Any) -> Any:
        """The mean cross-entropy of the targets."""
        x, rotation = self.embedding(tokens), None
        if self.positions is None:
            rotation = self.cos, self.sin
        else:
            x = x + self.positions
        x = x.to(self.dtype)
        for block in self.blocks:
            x = block(x, rotation)
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def attention_times(config: GPTConfig, batch: int) -> dict[str, float]:
    """Seconds of attention there and back on the GPU, by each of PyTorch's flash attentions that
    takes this shape.
    """
    dims, times = config.dims, {}
    q, k, v = (
        torch.randn(
            batch, config.context, dims[name], dims["head_dim"], device="cuda", dtype=torch.bfloat16
        )
        .transpose(1, 2)
        .requires_grad_()
        for name in ("heads", "kv_heads", "kv_heads")
    )
    grouped = dims["kv_heads"] < dims["heads"]
    for name, backend in BACKENDS.items():
        turns = []
        try:
            with attention_of.sdpa_kernel(getattr(attention_of.SDPBackend, backend)):
                for _ in range(8):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    y = functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=grouped
                    )
                    torch.autograd.grad(y, (q, k, v), q)
                    end.record()
                    torch.cuda.synchronize()
                    turns.append(begin.elapsed_time(end) / 1e3)
        except RuntimeError:
            continue
        times[name] = statistics.median(turns[3:])
    return times


def training(
    config: GPTConfig, tokens: np.ndarray, learning_rate: float, mode: str, attention: str
) -> tuple[Callable[[], None], Callable[[], float], dict[str, Any]]:
    """A step, what waits for it and gives its loss, and what was chosen."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    about: dict[str, Any] = {"torch": torch.__version__, "compiled": mode, "attention": None}
    scope: Callable[[], Any] = contextlib.nullcontext
    if device == "cuda":
        about["device"] = torch.cuda.get_device_name()
        if attention == "fastest":
            times = about["attention_seconds"] = attention_times(config, len(tokens))
            attention = min(times, key=lambda name: times[name])
        backend = getattr(attention_of.SDPBackend, BACKENDS[attention])
        scope, about["attention"] = lambda: attention_of.sdpa_kernel(backend), attention
        torch.cuda.reset_peak_memory_stats()
    with torch.device(device):
        model = GPT(config, torch.bfloat16)
    if device == "cuda" or shutil.which("g++") or shutil.which("clang++"):
        run = torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)
    else:  # only to try the path
        run, about["compiled"] = model, "no"
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)
    placed = torch.as_tensor(tokens, device=device).long()
    inputs, targets = placed[:, :-1].contiguous(), placed[:, 1:].contiguous()
    loss: Any = None

    def step() -> None:
        nonlocal loss
        with scope(), torch.autocast(device, torch.bfloat16):
            loss = run(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def wait() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
            about["peak_bytes"] = torch.cuda.max_memory_allocated()
        return loss.item()

    return step, wait, about
