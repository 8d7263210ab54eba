"""A pre-norm transformer and the thin models on it.

    x = x + attention(norm1(x));  x = x + mlp(norm2(x))                          one block

Initialisation, all of it, by `init_weights` from one explicit generator (`tests` check the table):

    | parameter                          | distribution                                    |
    |------------------------------------|-------------------------------------------------|
    | token embedding                    | normal, mean 0, std token_std (1.0)             |
    | position embedding, CLS token      | normal, mean 0, std position_std (0.3)          |
    | weight of linear layers, patches   | uniform on +-1/sqrt(inputs of the layer)        |
    | bias of linear layers, patches     | 0                                               |
    | layer norm, group norm             | scale 1, shift 0                                |
    | mask M                             | none here: a prior sets it (`inits`)            |
    | table of relative positions        | 0, by `rivals.RelativeBias`                     |

Shapes: B batch, N tokens, D width (`dim`), H heads, V vocabulary, S side of an image. The paper's symbols: its
X is `x`, (B, N, D), its M a block's `attention.mask`, its d `head_dim`. What the layers attend to is had by
`persistence.attention_maps(model, inputs)`.
"""
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from tinymask.attention import MaskedAttention, masks


def drop_branch(x: Tensor, probability: float, training: bool) -> Tensor:
    """A residual branch left out for whole examples, and scaled up for the others (arXiv 1603.09382). (B, N, D)."""
    if not training or probability == 0:
        return x
    kept = torch.rand(len(x), 1, 1, device=x.device) >= probability
    return x * kept / (1 - probability)


class Block(nn.Module):
    """Pre-norm transformer block, (B, N, D) -> (B, N, D). Arguments as in `Transformer`."""

    def __init__(self, *, dim: int, heads: int, head_dim: int | None = None, mlp_dim: int | None = None,
                 causal: bool = False, bias: bool = True, drop_path: float = 0.0, dropout: float = 0.0):
        super().__init__()
        mlp_dim, self.drop_path = mlp_dim or 4 * dim, drop_path
        self.dropout = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(dim)
        self.attention = MaskedAttention(dim, heads, head_dim, causal=causal, bias=bias)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + drop_branch(self.dropout(self.attention(self.norm1(x))), self.drop_path, self.training)
        return x + drop_branch(self.dropout(self.mlp(self.norm2(x))), self.drop_path, self.training)


class Transformer(nn.Module):
    """`depth` blocks and a last layer norm, (B, N, D) -> (B, N, D).

    head_dim None: dim // heads; mlp_dim None: 4 dim. bias: whether query, key, value and out have biases (the MLP
    always has). drop_path: of the last block's branches, see `drop_branch`; it grows from 0 in the first block.
    dropout: of single numbers in every branch.
    """

    def __init__(self, *, dim: int, depth: int, heads: int, head_dim: int | None = None, mlp_dim: int | None = None,
                 causal: bool = False, bias: bool = True, drop_path: float = 0.0, dropout: float = 0.0):
        super().__init__()
        rates = torch.linspace(0, drop_path, depth, device="cpu").tolist()
        self.blocks: Any = nn.ModuleList(
            Block(dim=dim, heads=heads, head_dim=head_dim, mlp_dim=mlp_dim, causal=causal, bias=bias, drop_path=rate,
                  dropout=dropout) for rate in rates)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Encoder(nn.Module):
    """Bits or digits in, `outputs` numbers out: (B, N) token ids, N = tokens -> (B, outputs).

    pooling "mean" averages the tokens after the last norm; "cls" puts a learned token in front (the sequence is then N
    + 1 long, and so is the mask) and reads that one; "none" reads each token, and the output is (B, N, outputs). Other
    arguments as in `Transformer`. Raises ValueError for another pooling, and for an input of another length.
    """

    def __init__(self, *, vocabulary: int, tokens: int, outputs: int, dim: int, depth: int, heads: int,
                 head_dim: int | None = None, mlp_dim: int | None = None, pooling: str = "mean", bias: bool = True):
        super().__init__()
        if pooling not in ("mean", "cls", "none"):
            raise ValueError(f"pooling is 'mean', 'cls' or 'none', got {pooling!r}")
        self.pooling = pooling
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.zeros(tokens, dim))
        self.cls = nn.Parameter(torch.zeros(1, dim)) if pooling == "cls" else None
        self.transformer = Transformer(dim=dim, depth=depth, heads=heads, head_dim=head_dim, mlp_dim=mlp_dim, bias=bias)
        self.head = nn.Linear(dim, outputs)

    def embed(self, ids: Tensor) -> Tensor:
        """(B, N) ids -> (B, N or N + 1, D), what the first block reads."""
        if ids.shape[1] != len(self.position):
            raise ValueError(f"{ids.shape[1]} tokens, this model reads {len(self.position)}")
        x = self.token(ids) + self.position
        return x if self.cls is None else torch.cat([self.cls.expand(len(ids), 1, -1), x], dim=1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer(self.embed(ids))
        if self.pooling == "mean":
            x = x.mean(dim=1)  # (B, D)
        elif self.pooling == "cls":
            x = x[:, 0]
        return self.head(x)


class ViT(nn.Module):
    """A vision transformer (arXiv 2010.11929): images (B, 3, S, S) -> class scores (B, classes).

    side S and patch: pixels; the image is cut into (S / patch)^2 tokens, row by row. pooling "mean" or "cls" (a learned
    token in front, with a position of its own). positions "learned", or "sincos", fixed. ViT-Tiny is dim 192, depth 12,
    heads 3, patch 16 at 224. Raises ValueError for a side that patch does not divide, a dim that heads (with sincos: 4)
    does not divide, another pooling, other positions, and an image of another size.
    """

    def __init__(self, *, side: int, patch: int, classes: int, dim: int = 192, depth: int = 12, heads: int = 3,
                 pooling: str = "cls", positions: str = "learned", drop_path: float = 0.0):
        super().__init__()
        if side % patch:
            raise ValueError(f"side {side} is not a multiple of patch {patch}")
        if pooling not in ("mean", "cls"):
            raise ValueError(f"pooling is 'mean' or 'cls', got {pooling!r}")
        if positions not in ("learned", "sincos"):
            raise ValueError(f"positions are 'learned' or 'sincos', got {positions!r}")
        self.patch = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, dim)) if pooling == "cls" else None
        if positions == "learned":
            self.position = nn.Parameter(torch.zeros((side // patch) ** 2 + (pooling == "cls"), dim))
        else:
            codes = sincos(side // patch, dim)
            self.register_buffer("position", torch.cat([torch.zeros(int(pooling == "cls"), dim), codes]))
        self.transformer = Transformer(dim=dim, depth=depth, heads=heads, drop_path=drop_path)
        self.head = nn.Linear(dim, classes)

    def embed(self, images: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, N, D), what the first block reads."""
        x = self.patch(images).flatten(2).transpose(1, 2)  # (B, N, D)
        if self.cls is not None:
            x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1)
        if x.shape[1] != len(self.position):
            raise ValueError(f"images of {images.shape[-1]} pixels, this model reads another size")
        return x + self.position

    def forward(self, images: Tensor) -> Tensor:
        x = self.transformer(self.embed(images))
        return self.head(x.mean(dim=1) if self.cls is None else x[:, 0])


def sincos(side: int, dim: int) -> Tensor:
    """Fixed position codes of a grid of side x side tokens, row by row: (side^2, dim).

    A quarter of the columns each for sine and cosine of the row and of the column, at frequencies from 1
    down to 1/10000 (arXiv 1706.03762, in two dimensions). Raises ValueError if 4 does not divide dim.
    """
    if dim % 4:
        raise ValueError(f"sincos positions need a dim that 4 divides, got {dim}")
    angles = torch.arange(side)[:, None] / 10000 ** (torch.arange(dim // 4) / (dim // 4))  # (side, dim / 4)
    codes = torch.cat([angles.sin(), angles.cos()], dim=1)  # (side, dim / 2)
    return torch.cat([codes.repeat_interleave(side, dim=0), codes.repeat(side, 1)], dim=1)


class GPT(nn.Module):
    """A causal language model with learned positions: (B, N) token ids, N <= block -> logits (B, N, V).

    Arguments as in `Transformer`. Raises ValueError for an input longer than block.
    """

    def __init__(self, *, vocabulary: int, block: int, dim: int, depth: int, heads: int, head_dim: int | None = None,
                 mlp_dim: int | None = None, dropout: float = 0.0):
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.zeros(block, dim))
        self.transformer = Transformer(dim=dim, depth=depth, heads=heads, head_dim=head_dim, mlp_dim=mlp_dim,
                                       causal=True, dropout=dropout)
        self.head = nn.Linear(dim, vocabulary)

    def embed(self, ids: Tensor) -> Tensor:
        """(B, N) ids -> (B, N, D), what the first block reads."""
        if ids.shape[1] > len(self.position):
            raise ValueError(f"{ids.shape[1]} tokens, this model reads at most {len(self.position)}")
        return self.token(ids) + self.position[: ids.shape[1]]

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.transformer(self.embed(ids)))


@torch.no_grad()
def generate(model: GPT, ids: Tensor, count: int, temperature: float = 1.0, top_k: int | None = None,
             generator: torch.Generator | None = None) -> Tensor:
    """Go on with token ids (B, N), N >= 1, by `count` tokens of a GPT: (B, N + count).

    Each is drawn from softmax(logits / temperature), of the top_k likeliest if given; temperature 0 takes the
    likeliest. Longer texts than the model's block are read from its last `block` tokens on.
    """
    block = len(model.position)
    for _ in range(count):
        logits = model(ids[:, -block:])[:, -1]  # (B, V)
        if temperature == 0:
            token = logits.argmax(dim=-1, keepdim=True)
        else:
            if top_k is not None and top_k < logits.shape[-1]:
                least = logits.topk(top_k, dim=-1).values[:, -1:]
                logits = logits.masked_fill(logits < least, float("-inf"))
            logits = logits.double() - logits.amax(dim=-1, keepdim=True)  # finite at any temperature
            share = (logits / temperature).softmax(dim=-1).cpu()
            token = torch.multinomial(share, 1, generator=generator).to(ids.device)
        ids = torch.cat([ids, token], dim=1)
    return ids


def init_weights(model: nn.Module, generator: torch.Generator, token_std: float = 1.0,
                 position_std: float = 0.3) -> nn.Module:
    """Draw every weight of model anew, as the table above says, and return it. Masks are left as they are."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            bound = module.weight[0].numel() ** -0.5
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=token_std, generator=generator)
        elif isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters():
        if name.split(".")[-1] in ("position", "cls"):
            nn.init.normal_(parameter, std=position_std, generator=generator)
    return model


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """How many numbers the model has (`total`), how many of them are trained (`trainable`) and are masks (`mask`)."""
    parameters = list(model.parameters())
    return {
        "total": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "mask": sum(mask.numel() for mask in masks(model).values()),
    }


def parameter_groups(model: nn.Module, *, lr: float, mask_lr: float, weight_decay: float,
                     mask_weight_decay: float = 0.0) -> list[dict]:
    """Two optimiser groups, complete and disjoint: all parameters but the masks, and the masks, by default not decayed.

    Decay would pull M to 0, that is to no prior. A layer's position_bias is in the masks' group: as a mask's rival it
    has the mask's rate and, by default, no decay. Frozen parameters are in neither group.
    """
    biases = nn.ModuleList(layer.position_bias for layer in model.modules()
                           if isinstance(layer, MaskedAttention) and layer.position_bias is not None)
    of_masks = [*masks(model).values(), *biases.parameters()]
    others = [p for p in model.parameters() if not any(p is mask for mask in of_masks)]
    return [
        {"params": [p for p in params if p.requires_grad], "lr": rate, "weight_decay": decay}
        for params, rate, decay in ((others, lr, weight_decay), (of_masks, mask_lr, mask_weight_decay))
    ]
