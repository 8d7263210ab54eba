"""Attention with a structural prior in the logits. Needs only torch: copy this file out and it works.

    attention(Q, K, V; M) = softmax(Q K^T / sqrt(d) + log sigmoid(M)) V          (paper, section 4.1)

M is a finite, learnable matrix of *mask logits*. log sigmoid(M) is at most 0, so M can only hold
interactions back: +10 leaves a pair of tokens alone (-0.00005), -10 costs it 10 nats, 0 costs 0.69.
Softmax ignores a constant added to a row, so a row of M whose entries are all equal carries no prior.

Here        the paper's
B           -               batch
N           N               tokens
D           D               width, `dim`
H           -               heads
Dh          d               width of a head, `head_dim`
x           X               what the layer reads, (B, N, D)
query ...   X W_Q ...       projected and split into heads, (B, H, N, Dh); the layers of that name hold W_Q, W_K, W_V
mask        M               mask logits, (N, N) or (H, N, N)
weights     softmax(...)    attention weights, (B, H, N, N)
"""
import math
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

LIMIT = 1e4  # of finite mask logits: beyond it, M and the logits it is added to would overflow in half precision


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None = None, causal: bool = False,
                      squash: bool = True) -> Tensor:
    """The softmax of the formula, unchecked; arguments as in `masked_attention`. Returns (B, H, N, N), rows sum to 1.

    >>> x = torch.ones(1, 1, 2, 4)                            # equal tokens: the mask alone decides
    >>> swap = torch.tensor([[-10.0, 10.0], [10.0, -10.0]])
    >>> attention_weights(x, x, swap)[0, 0].round(decimals=4).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    logits = (query @ key.transpose(-2, -1)).div_(math.sqrt(query.shape[-1]))  # (B, H, N, N)
    bias = mask
    if mask is not None and squash:
        # logsigmoid, never log(sigmoid(.)): sigmoid(-120) is 0 in float32 and its log -inf
        bias = F.logsigmoid(mask)  # (N, N) or (H, N, N)
    if causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        bias = torch.zeros_like(future, dtype=logits.dtype) if bias is None else bias
        bias = bias.masked_fill(future, float("-inf"))
    if bias is not None:
        logits = logits + bias  # a float32 mask lifts half precision logits to float32
    return logits.softmax(dim=-1).to(query.dtype)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False,
                     return_attention: bool = False, squash: bool = True) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention with the bias log sigmoid(mask) on its logits.

    query, key, value: (B, H, N, Dh). mask: (N, N) or (H, N, N), floating point, any real number; it is a logit, not a
    probability, and a boolean mask is refused. Entry -inf removes a pair for good (a hard mask); a row without any
    finite entry gives NaN, and so may finite ones beyond +-LIMIT in half precision: `MaskedAttention.set_mask` refuses
    both, this function and load_state_dict do not look. causal: row i sees columns 0..i only. squash=False
    adds mask itself, a plain bias, for comparison. Where keys come from another sequence than queries, mask is
    (N_query, N_key). Returns (B, H, N, Dh), and with return_attention also the weights (B, H, N, N), rows summing to 1.
    Raises ValueError for a mask of the wrong shape or kind.
    """
    if mask is not None:
        _check_kind_and_shape(mask, query.shape[1], query.shape[2], key.shape[2])
    weights = attention_weights(query, key, mask, causal, squash)
    output = weights @ value
    return (output, weights) if return_attention else output


def _check_kind_and_shape(mask: Tensor, heads: int, queries: int, keys: int) -> None:
    if not torch.is_floating_point(mask):
        raise ValueError(
            f"a mask holds logits of log sigmoid(M), floating point; got {mask.dtype} "
            "(for a 0/1 support use mask_priors.to_mask, which opens at +10 and closes at -10)"
        )
    if tuple(mask.shape) not in ((queries, keys), (heads, queries, keys)):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; wanted {(queries, keys)} or {(heads, queries, keys)}"
        )


def _check_values(mask: Tensor, causal: bool, learnable: bool) -> None:
    hard = mask.isneginf()
    if bool((~mask.isfinite() & ~hard).any()):
        raise ValueError("mask holds NaN or +inf; wanted finite logits, or -inf for a hard mask")
    if bool((mask.abs() > LIMIT)[~hard].any()):
        raise ValueError(f"mask holds a finite logit beyond +-{LIMIT:g}, more than half precision can add")
    if learnable and bool(hard.any()):
        raise ValueError("mask holds -inf, which no gradient moves: give learnable=False")
    if causal:
        hard = hard | torch.ones_like(hard).triu(1)
    if bool(hard.all(dim=-1).any()):
        raise ValueError("mask has a row without any open entry: softmax over it would be NaN")


class MaskedAttention(nn.Module):
    """Multi-head self-attention whose structural prior is the parameter `.mask` (M, or None).

    (B, N, D) -> (B, N, D). head_dim None: dim // heads. mask: as in `set_mask`. A causal layer takes inputs shorter
    than its mask, and uses the top left corner; with a dynamic length, torch.export takes only shorter ones.
    `.position_bias` and `.rotate` are attributes, None unless set. Raises ValueError for a dim that heads does not
    divide, for a mask as `set_mask` does, for an input of another length than the mask's, and for one when there is a
    position_bias beside the mask.
    """

    def __init__(self, dim: int, heads: int, head_dim: int | None = None, mask: Tensor | None = None,
                 causal: bool = False, bias: bool = True):
        super().__init__()
        if head_dim is None:
            if heads < 1 or dim % heads:
                raise ValueError(f"dim {dim} is not a multiple of heads {heads}; give head_dim")
            head_dim = dim // heads
        self.heads, self.causal, self.squash = heads, causal, True
        # separate projections: rows h * head_dim ... (h + 1) * head_dim - 1 of a weight are head h
        self.query = nn.Linear(dim, heads * head_dim, bias=bias)
        self.key = nn.Linear(dim, heads * head_dim, bias=bias)
        self.value = nn.Linear(dim, heads * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, dim, bias=bias)
        self.mask: nn.Parameter | None
        self.register_parameter("mask", None)
        if mask is not None:
            self.set_mask(mask)
        # what people use in place of a mask, see `rivals`
        self.position_bias: nn.Module | None = None  # n tokens -> (H, n, n), added to the logits as it is
        self.rotate: Callable[[Tensor], Tensor] | None = None  # of query and of key, (B, H, N, Dh) each

    def set_mask(self, mask: Tensor, learnable: bool = True, squash: bool = True) -> None:
        """Make a copy of mask, (N, N) or (H, N, N), the parameter M; squash: see `masked_attention`.

        Needed before load_state_dict too: a module without a mask has no place for a saved one. Raises ValueError
        for a mask of the wrong shape or kind, with NaN, +inf, a finite entry beyond +-10,000 or a row wholly at
        -inf, and for a learnable one with any -inf.
        """
        tokens = mask.shape[-1] if mask.ndim else 0
        _check_kind_and_shape(mask, self.heads, tokens, tokens)
        if not mask.is_meta:
            _check_values(mask.detach(), self.causal, learnable)
        self.mask = nn.Parameter(mask.detach().clone(), requires_grad=learnable)
        self.squash = squash

    def query_and_key(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (B, N, D)
        """Projected and split into heads: (B, N, D) -> (B, H, N, Dh) each."""
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, Dh)
        key = self.key(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, Dh)
        if self.rotate is not None:
            query, key = self.rotate(query), self.rotate(key)
        return query, key

    def weights(self, x: Tensor) -> Tensor:  # (B, N, D)
        """Attention weights of this layer on its input x: (B, N, D) -> (B, H, N, N)."""
        query, key = self.query_and_key(x)  # (B, H, N, Dh) each
        mask, squash, tokens = None, self.squash, x.shape[1]
        if self.mask is not None:
            size = self.mask.shape[-1]
            if tokens > size or tokens < size and not self.causal:
                raise ValueError(f"{tokens} tokens, the mask is for {size}")
            mask = self.mask[..., :tokens, :tokens]
        if self.position_bias is not None:
            if mask is not None:
                raise ValueError("a layer has a mask or a position_bias, not both")
            mask, squash = self.position_bias(tokens), False
        return attention_weights(query, key, mask, self.causal, squash)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D)
        weights = self.weights(x)  # (B, H, N, N)
        value = self.value(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, Dh)
        return self.out((weights @ value).transpose(1, 2).flatten(2))  # (B, N, D)

    # what the numbers in `mask` mean is saved with them: a plain bias does not come back as M
    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.squash)

    def set_extra_state(self, state: Tensor) -> None:
        self.squash = bool(state)


def masks(model: nn.Module) -> dict[str, nn.Parameter]:
    """The masks of every MaskedAttention in a model, name -> parameter. A fork's own parameters are no masks."""
    return {f"{name}.mask".lstrip("."): layer.mask for name, layer in model.named_modules()
            if isinstance(layer, MaskedAttention) and layer.mask is not None}
