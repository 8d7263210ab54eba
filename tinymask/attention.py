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
attention   softmax(...)    weights, (B, H, N, N)
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def attend(query, key, value, mask=None, causal=False, squash=True):
    """The formula, unchecked; arguments as in `masked_attention`. Returns output (B, H, N, Dh), weights (B, H, N, N).

    Both have value's dtype, also where a float32 mask meets queries in half precision.

    >>> x = torch.ones(1, 1, 2, 4)                            # equal tokens: the mask alone decides
    >>> swap = torch.tensor([[-10.0, 10.0], [10.0, -10.0]])
    >>> attend(x, x, x, swap)[1][0, 0, 0].round(decimals=4).tolist()
    [0.0, 1.0]
    """
    logits = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # (B, H, N, N)
    if mask is not None:
        # logsigmoid, never log(sigmoid(.)): sigmoid(-120) is 0 in float32 and its log -inf.
        # A float32 mask lifts half precision logits to float32, where no finite M overflows.
        logits = logits + (F.logsigmoid(mask) if squash else mask)
    if causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, float("-inf"))
    attention = logits.softmax(dim=-1).to(value.dtype)  # (B, H, N, N)
    return attention @ value, attention


def masked_attention(query, key, value, mask=None, causal=False, return_attention=False, squash=True):
    """Softmax attention with the bias log sigmoid(mask) on its logits.

    query, key, value: (B, H, N, Dh). mask: (N, N) or (H, N, N), floating point, any real number;
    it is a logit, not a probability, and a boolean mask is refused. Entry -inf removes a pair for
    good (a hard mask); a row must keep one finite entry. causal: row i sees columns 0..i only.
    squash=False adds mask itself, a plain bias, for comparison.
    Returns (B, H, N, Dh), and with return_attention also the weights (B, H, N, N), rows summing
    to 1. Raises ValueError for a mask of the wrong shape or kind, or with a row wholly at -inf.
    """
    if mask is not None:
        check_mask(mask, heads=query.shape[1], tokens=query.shape[2])
        check_rows(mask, causal)
    output, attention = attend(query, key, value, mask, causal, squash)
    return (output, attention) if return_attention else output


def check_mask(mask, heads, tokens):
    """Raise ValueError unless mask is a floating point (tokens, tokens) or (heads, tokens, tokens)."""
    if not torch.is_floating_point(mask):
        raise ValueError(
            f"a mask holds logits of log sigmoid(M), floating point; got {mask.dtype} "
            "(for a 0/1 support use mask_priors.to_mask, which opens at +10 and closes at -10)"
        )
    if tuple(mask.shape) not in ((tokens, tokens), (heads, tokens, tokens)):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; wanted {(tokens, tokens)} or {(heads, tokens, tokens)}"
        )


def check_rows(mask, causal=False):
    """Raise ValueError if a row of mask has no open entry to attend to. NaN passes: it shows in the output."""
    seen = mask.detach()
    if causal:
        seen = seen.masked_fill(torch.ones_like(seen, dtype=torch.bool).triu(1), float("-inf"))
    if bool(seen.isneginf().all(dim=-1).any()):
        raise ValueError("mask has a row without any open entry: softmax over it would be NaN")


class MaskedAttention(nn.Module):
    """Multi-head self-attention whose structural prior is the parameter `.mask` (M, or None).

    (B, N, D) -> (B, N, D). head_dim None: dim // heads. mask: (N, N) shared by the heads, or
    (H, N, N); it is copied into a parameter. Inputs shorter than the mask use its top left corner.
    Raises ValueError for a dim that heads does not divide, as `masked_attention` does, and for a mask with NaN
    or +inf.
    """

    def __init__(self, dim, heads, head_dim=None, mask=None, causal=False, bias=True):
        super().__init__()
        if head_dim is None:
            if heads < 1 or dim % heads:
                raise ValueError(f"dim {dim} is not a multiple of heads {heads}; give head_dim")
            head_dim = dim // heads
        self.heads, self.causal = heads, causal
        # separate projections: rows h * head_dim ... (h + 1) * head_dim - 1 of a weight are head h
        self.query = nn.Linear(dim, heads * head_dim, bias=bias)
        self.key = nn.Linear(dim, heads * head_dim, bias=bias)
        self.value = nn.Linear(dim, heads * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, dim, bias=bias)
        self.squash = True
        self.register_parameter("mask", None)
        if mask is not None:
            self.set_mask(mask)

    def set_mask(self, mask, learnable=True, squash=True):
        """Make a copy of mask, (N, N) or (H, N, N), the parameter M; squash, errors: see `masked_attention`.

        Needed before load_state_dict too: a module without a mask has no place for a saved one.
        """
        check_mask(mask, heads=self.heads, tokens=mask.shape[-1] if mask.ndim else 0)
        check_rows(mask, self.causal)
        if bool((mask.isnan() | mask.isposinf()).any()):
            raise ValueError("mask holds NaN or +inf; wanted finite logits, or -inf for a hard mask")
        self.mask = nn.Parameter(mask.detach().clone(), requires_grad=learnable)
        self.squash = squash

    def forward(self, x, return_attention=False):  # (B, N, D)
        tokens = x.shape[1]
        mask = None if self.mask is None else self.mask[..., :tokens, :tokens]
        if mask is not None:  # its rows were looked at when it was set; an M that runs off in training shows as NaN
            check_mask(mask, self.heads, tokens)
            # a corner of M may lack a row's only open entry; not if M itself has run off, see above
            if tokens < self.mask.shape[-1] and bool(self.mask.isfinite().any(dim=-1).all()):
                check_rows(mask, self.causal)
        heads = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, Dh)
            for projection in (self.query, self.key, self.value)
        )
        output, attention = attend(*heads, mask, self.causal, self.squash)
        output = self.out(output.transpose(1, 2).flatten(2))  # (B, N, D)
        return (output, attention) if return_attention else output
