"""What the name of an init means: one row of a table, and the few lines that carry it out.

Every init of one seed starts from the same weights, apart from what its row sets. A fork adds a row here (or to a
script's own `INITS`), and the name works on that script's command line, in its tables and in its figures.

    default, svd, opt, mimetic, impulse       no prior, and the query-key family (`qk_init`)
    mask, mask-only, mask-literal, ...        the mask family (`mask_priors`)
    relative, gated, rotary, rotary-mask      what people use in place of a mask, and both (`rivals`)
    cnn                                       no transformer: a convolutional net of the same size, a yardstick
    the rest                                  controls: what would show that something else does the work

Shapes: N tokens, H heads; a support or mask is (N, N) or (H, N, N).
"""
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tinymask.attention import MaskedAttention
from tinymask.rivals import HadamardAttention, RelativeBias, rotary


def as_it_is(logits: Tensor) -> Tensor:
    """M starts at the prior's own logits."""
    return logits


class Init(NamedTuple):
    """One row: what an init sets. All that it does not name is as in `default`."""

    mask: Callable[[Tensor], Tensor] | None = None  # prior's logits -> what M starts at; None: no mask
    learnable: bool = True  # is M trained?
    squash: bool = True  # log sigmoid(M) on the logits, or M itself
    query_key: str | None = None  # a function of `qk_init` that writes W_Q and W_K
    freeze_query_key: bool = False  # are W_Q and W_K left as they were written?
    freeze_inputs: bool = False  # are embeddings and the first norm, that is what the first layer reads?
    design: str = "ours"  # which support, a key of the tables in `mask_priors`
    shuffled: bool = False  # each row of the support in random order
    closed: float | None = None  # mask logit of closed pairs, whatever --closed says
    positions: bool = True  # False: no position codes
    relative: bool = False  # a learned number for each head and relative position, beside the position codes
    gated: bool = False  # ConViT's attention, in part of the position alone, which the script builds
    cnn: bool = False  # no attention at all
    rotary: bool = False  # query and key turned by their positions
    product: bool = False  # sigmoid(M) times the softmax, not log sigmoid(M) inside it


INITS = {
    "default": Init(),
    "svd": Init(query_key="svd"),
    "opt": Init(query_key="opt"),
    "mimetic": Init(query_key="mimetic"),
    "impulse": Init(query_key="impulse"),
    "mask": Init(mask=as_it_is),
    "mask-literal": Init(mask=as_it_is, design="literal"),
    # what leaks through a closed pair is a bit alone, hence -30: the mask is what tells tokens apart
    "mask-only": Init(mask=as_it_is, design="alone", closed=-30.0, positions=False),
    "mask-slopes": Init(mask=as_it_is, design="slopes"),
    "relative": Init(relative=True),
    "gated": Init(gated=True),
    "cnn": Init(cnn=True),
    "rotary": Init(rotary=True, positions=False),
    "rotary-mask": Init(mask=as_it_is, design="slopes", rotary=True, positions=False),
    # controls
    "mask-zero": Init(mask=torch.zeros_like),
    "mask-frozen": Init(mask=as_it_is, learnable=False),
    "mask-hard": Init(mask=as_it_is, learnable=False, closed=-math.inf),
    "mask-shuffled": Init(mask=as_it_is, shuffled=True),
    "bias": Init(mask=F.logsigmoid, squash=False),
    "alibi": Init(mask=as_it_is, squash=False, learnable=False, design="slopes"),
    "hadamard": Init(mask=as_it_is, product=True),
    "svd-shuffled": Init(query_key="svd", shuffled=True),
    "svd-frozen": Init(query_key="svd", freeze_query_key=True),
    "opt-frozen": Init(query_key="opt", freeze_query_key=True),
    "svd-fixed": Init(query_key="svd", freeze_query_key=True, freeze_inputs=True),  # layer 1 attends as at the start
    "svd-published": Init(query_key="impulse"),  # solved on position codes alone, as arXiv 2505.19985 does
}


def rows(names: Iterable[str]) -> dict[str, Init]:
    """The rows of these names. Raises ValueError for a name that the table does not have."""
    for name in names:
        if name not in INITS:
            raise ValueError(f"no init {name!r}; there are: {', '.join(INITS)}")
    return {name: INITS[name] for name in names}


def set_prior(attention: MaskedAttention, init: Init, logits: Tensor, index: Tensor | None = None) -> None:
    """Give a layer what a row says of M, for a prior with these mask logits, of its rivals and of training W_Q, W_K.

    index: which relative position a pair has, see `rivals.RelativeBias`; a row that is `relative` needs it.
    """
    if init.mask is not None:
        attention.set_mask(init.mask(logits), learnable=init.learnable, squash=init.squash)
    if init.product:
        attention.__class__ = HadamardAttention  # the same weights, read otherwise
    if init.relative:
        attention.position_bias = RelativeBias(index, attention.heads)  # type: ignore[arg-type]
    if init.rotary:
        attention.rotate = rotary
    if init.freeze_query_key:
        attention.query.requires_grad_(False)
        attention.key.requires_grad_(False)


# -- priors made wrong on purpose -----------------------------------------------------------------------------------


def shuffled(support: Tensor, generator: torch.Generator, causal: bool = False) -> Tensor:
    """The control with the right sparsity and the wrong structure: each row's columns permuted. Same shape.

    By chance a row may keep a right link. causal: only the columns that a row can see are permuted.
    """
    order = torch.rand(support.shape, generator=generator)
    if causal:
        order += torch.arange(support.shape[-1]).expand(support.shape).triu(1)  # the future stays where it is
    return support.gather(-1, order.argsort(dim=-1))


def imperfect(support: Tensor, missing: int, wrong: int, generator: torch.Generator) -> Tensor:
    """A prior with mistakes: `missing` of its links closed, `wrong` links opened that it does not have.

    A link is an open pair (i, j), i != j. Wrong links start in rows that have a right one, where they
    do most harm; a row that loses all looks at itself. Heads share the mistakes. (N, N) or (H, N, N),
    same shape. Raises ValueError if there are fewer links to close, or to open, than asked for.
    """
    tokens = support.shape[-1]
    others = ~torch.eye(tokens, dtype=torch.bool)
    links = others & (support.reshape(-1, tokens, tokens).amax(dim=0) > 0)
    openable = others & ~links & links.any(dim=-1, keepdim=True)
    changed = support.clone()
    for value, count, pairs, kind in ((0, missing, links, "missing"), (1, wrong, openable, "wrong")):
        pairs = pairs.nonzero()  # (pairs, 2)
        if count > len(pairs):
            raise ValueError(f"{count} {kind} links, there is room for {len(pairs)}")
        row, column = pairs[torch.randperm(len(pairs), generator=generator)[:count]].T
        changed[..., row, column] = value
    emptied = (changed.amax(dim=-1, keepdim=True) == 0) & (support.amax(dim=-1, keepdim=True) > 0)
    return torch.maximum(changed, torch.eye(tokens) * emptied)
