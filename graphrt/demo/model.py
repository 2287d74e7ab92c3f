"""A small byte-level language model of KDA layers, with one forward for training and for decoding.

A block is

    x = x + W_o (RMSNorm(mix(...)) * sigmoid(output gate))        mix: short convolution, silu, KDA
    x = x + W_down (silu(W_a n) * W_b n),   n = RMSNorm(x)

and everything except `mix` acts on each token alone. `mix` is therefore an argument: `graphrt.demo.sequence` mixes
whole sequences (training), `graphrt.demo.step` mixes the windows of one speculative step through graphrt's verify
functions. Both use the same weights and the same code around them.

Weights are stored in BF16 and widened to FP32 once, when loaded. Activations are FP32 but for what enters the mix of a
decode step, which is BF16 as in an engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

VOCABULARY = 256
WEIGHTS_FILE = "weights.safetensors"
NORM_EPSILON = 1e-6

# mix(layer index, block, qkv [..., 3*H*K], raw_g [..., H*K], raw_beta [..., H]) -> [..., H*V]
Mix = Callable[[int, "Block", Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults are those of the weights in the package."""

    width: int = 256
    num_layers: int = 3
    num_heads: int = 2
    head_dim: int = 128
    conv_width: int = 4
    mlp_width: int = 384
    gate_rank: int = 64
    # Log decay per token lies in (gate_lower_bound, 0).
    gate_lower_bound: float = -5.0

    @property
    def inner(self) -> int:
        """H*K, the width of q, of k, of v and of the gates."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """3*H*K: q, k and v pass through one convolution."""
        return 3 * self.inner


class Block(nn.Module):
    """One layer: the projections around a KDA mix, and an MLP. All maps are per token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.config = c
        self.mix_norm = nn.RMSNorm(c.width, eps=NORM_EPSILON)
        self.qkv = nn.Linear(c.width, c.conv_dim, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(c.conv_dim, c.conv_width))
        self.beta = nn.Linear(c.width, c.num_heads, bias=False)
        self.decay_down = nn.Linear(c.width, c.gate_rank, bias=False)
        self.decay_up = nn.Linear(c.gate_rank, c.inner, bias=False)
        self.A_log = nn.Parameter(torch.empty(c.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(c.inner))
        self.gate_down = nn.Linear(c.width, c.gate_rank, bias=False)
        self.gate_up = nn.Linear(c.gate_rank, c.inner, bias=False)
        self.head_norm = nn.RMSNorm(c.head_dim, eps=NORM_EPSILON)
        self.out = nn.Linear(c.inner, c.width, bias=False)
        self.mlp_norm = nn.RMSNorm(c.width, eps=NORM_EPSILON)
        self.mlp_up = nn.Linear(c.width, 2 * c.mlp_width, bias=False)
        self.mlp_down = nn.Linear(c.mlp_width, c.width, bias=False)

    def forward(self, x: Tensor, layer: int, mix: Mix) -> Tensor:
        """x [..., width] -> [..., width]."""
        n = self.mix_norm(x)
        mixed = mix(layer, self, self.qkv(n), self.decay_up(self.decay_down(n)), self.beta(n))
        heads = mixed.unflatten(-1, (self.config.num_heads, self.config.head_dim))
        gate = torch.sigmoid(self.gate_up(self.gate_down(n)))
        x = x + self.out(self.head_norm(heads).flatten(-2) * gate)
        a, b = self.mlp_up(self.mlp_norm(x)).chunk(2, dim=-1)
        down: Tensor = self.mlp_down(F.silu(a) * b)
        return x + down


class ByteModel(nn.Module):
    """Bytes in, logits of the next byte out; embedding and output share one matrix."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config or ModelConfig()
        self.embedding = nn.Embedding(VOCABULARY, self.config.width)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(self.config.num_layers))
        self.norm = nn.RMSNorm(self.config.width, eps=NORM_EPSILON)

    def forward(self, tokens: Tensor, mix: Mix) -> Tensor:
        """Logits [..., 256] float32 for tokens [...] int64 in 0..255."""
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, mix)
        return F.linear(self.norm(x), self.embedding.weight).float()

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights a training starts from; residual branches start small."""
        c = self.config
        for name, p in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(p)
            elif name.endswith("A_log"):
                nn.init.zeros_(p)
            elif name.endswith("dt_bias"):
                _spread_decay(p, c.gate_lower_bound, generator)
            elif name.endswith("conv_weight"):
                nn.init.uniform_(p, -(c.conv_width**-0.5), c.conv_width**-0.5, generator=generator)
            else:
                small = name.endswith(("out.weight", "mlp_down.weight", "decay_up.weight"))
                scale = 0.3 if small else 1.0
                nn.init.normal_(p, std=scale * p.shape[-1] ** -0.5, generator=generator)


def _spread_decay(dt_bias: Tensor, lower_bound: float, generator: torch.Generator) -> None:
    """Give the channels memories between one token and a thousand: -g log-uniform in [1e-3, 1]."""
    exponent = torch.empty_like(dt_bias).uniform_(-3.0, 0.0, generator=generator)
    with torch.no_grad():
        dt_bias.copy_(torch.logit(10.0**exponent / -lower_bound))


def save_weights(model: ByteModel, path: Path) -> None:
    """Write the parameters as BF16 safetensors."""
    tensors = {n: p.detach().to("cpu", torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(tensors, path)


def load_model(device: torch.device | str = "cpu", path: Path | None = None) -> ByteModel:
    """The trained model in FP32 (BF16 weights, widened once), without gradients.

    `path` is a safetensors file of the default sizes; without it the weights in the package are taken.
    Raises FileNotFoundError when there is none.
    """
    file = path or Path(str(resources.files(__package__) / WEIGHTS_FILE))
    if not file.is_file():
        raise FileNotFoundError(f"weights: expected a safetensors file at {file}; tools/train_demo.py makes one")
    model = ByteModel()
    model.load_state_dict({n: t.float() for n, t in load_file(file).items()})
    return model.requires_grad_(False).eval().to(device)
