"""How much of a prior training leaves, and what moved it: the paper's claim, measured in every run.

By outcome: attention on the prior's support before and after (`measures`). By mechanism: what changed the attention
logits since step 0, the mask, the projections W_Q and W_K, or what the layer reads (`logit_changes`); and how large
the gradients are that could do so (`gradient_sizes`).

Shapes: B batch, N tokens, D width, H heads. Maps are a list with the attention weights of each layer, (B, H, N, N); a
support, (N, N) or (H, N, N), is 1 where the prior lets row i look at column j. Mask logits are the paper's M, attention
is its softmax(...).
"""
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tinymask.attention import MaskedAttention, masks


def layers_of(model: nn.Module) -> list[MaskedAttention]:
    """The attention layers of a model, first to last."""
    return [layer for layer in model.modules() if isinstance(layer, MaskedAttention)]


@torch.no_grad()
def read_by_layers(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """What each attention layer reads, (B, N, D), where a model is evaluated on inputs."""
    read: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda layer, x: read.append(x[0])) for layer in layers_of(model)]
    training = model.training
    model.eval()
    try:
        model(inputs)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return read


@torch.no_grad()
def attention_maps(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """What a model attends to, evaluated: one (B, H, N, N) for each of its MaskedAttention layers, on the CPU."""
    return [layer.weights(x).cpu() for layer, x in zip(layers_of(model), read_by_layers(model, inputs), strict=True)]


class Snapshot(NamedTuple):
    """What is compared before and after training, one entry for each layer."""

    maps: list[Tensor]  # attention, (B, H, N, N)
    masks: list[Tensor]  # mask logits, of the layers that have a mask
    query_norms: list[float]  # Frobenius, of W_Q


def snapshot(model: nn.Module, inputs: Tensor) -> Snapshot:
    """A model as it is now, its attention that on inputs."""
    return Snapshot(attention_maps(model, inputs), [mask.detach().cpu().clone() for mask in masks(model).values()],
                    [layer.query.weight.norm().item() for layer in layers_of(model)])


def measures(first: Snapshot, last: Snapshot, supports: list[Tensor] | None = None, causal: bool = False) -> dict:
    """What a result line says of two snapshots: support_mass_init and _final, and what chance gives, support_chance
    (lists of floats, one a layer, left out without supports), attention_shift (a float), mask_drift (a float, None
    without masks), query_norm_init and _final (lists of floats)."""
    mass = {} if supports is None else {
        "support_mass_init": support_mass(first.maps, supports, causal),
        "support_mass_final": support_mass(last.maps, supports, causal),
        "support_chance": support_mass([even(attention, causal) for attention in first.maps], supports, causal),
    }
    return mass | {"attention_shift": attention_shift(first.maps, last.maps),
                   "mask_drift": mask_drift(first.masks, last.masks),
                   "query_norm_init": first.query_norms, "query_norm_final": last.query_norms}


def even(attention: Tensor, causal: bool = False) -> Tensor:
    """Attention to all visible tokens alike, shaped as one example of attention: (B, H, N, N) -> (1, H, N, N)."""
    visible = torch.ones_like(attention[:1])
    visible = visible.tril() if causal else visible
    return visible / visible.sum(-1, keepdim=True)


def with_prior(support: Tensor, heads: int, causal: bool = False) -> tuple[Tensor, Tensor]:
    """The pairs that a prior opens and those it closes: two boolean (H, N, N), of the rows that it says something of.

    A row has no prior where its support is empty, or holds all that the row can see (all tokens; causal: those up
    to its own).

    >>> opened, closed = with_prior(torch.tensor([[0.0, 1.0], [1.0, 1.0]]), heads=1)  # row 1 may look anywhere
    >>> opened.int().tolist(), closed.int().tolist()
    ([[[0, 1], [0, 0]]], [[[1, 0], [0, 0]]])
    """
    opened = support.expand(heads, *support.shape[-2:]) > 0
    visible = torch.ones_like(opened).tril() if causal else torch.ones_like(opened)
    counts = (opened & visible).sum(-1, keepdim=True)  # (H, N, 1)
    has_prior = (counts > 0) & (counts < visible.sum(-1, keepdim=True))
    return opened & visible & has_prior, ~opened & visible & has_prior


def support_mass(maps: list[Tensor], supports: list[Tensor], causal: bool = False) -> list[float]:
    """Attention on the support, for each layer: a mean over heads, inputs and the rows that have a prior.

    NaN for a layer without any row that has one, see `with_prior`.

    >>> uniform = torch.full((1, 1, 2, 2), 0.5)
    >>> support_mass([uniform], [torch.tensor([[0.0, 1.0], [1.0, 1.0]])])  # row 1 may look anywhere
    [0.5]
    """
    masses = []
    for attention, support in zip(maps, supports, strict=True):
        opened, closed = (pairs.to(attention.device) for pairs in with_prior(support, attention.shape[1], causal))
        masses.append((attention * opened).sum(-1)[:, opened.any(-1)].mean().item())
    return masses


def attention_shift(first: list[Tensor], last: list[Tensor]) -> float:
    """Total variation between the attention of two models, half the L1 distance of two rows; a mean, in [0, 1].

    >>> attention_shift([torch.eye(2)[None, None]], [torch.full((1, 1, 2, 2), 0.5)])
    0.5
    """
    return sum((a - b).abs().sum(-1).mean().item() / 2 for a, b in zip(first, last, strict=True)) / len(first)


def mask_drift(first: list[Tensor], last: list[Tensor]) -> float | None:
    """Mean absolute change of the finite mask logits M; None without masks. Lists of (N, N) or (H, N, N).

    >>> mask_drift([torch.zeros(2, 2)], [torch.tensor([[0.0, 1.0], [-1.0, 0.0]])])
    0.5
    """
    drift = [(b - a)[a.isfinite()].abs().mean().item() for a, b in zip(first, last, strict=True)]
    return sum(drift) / len(drift) if drift else None


# -- the mechanism ----------------------------------------------------------------------------


class LogitParts(NamedTuple):
    """What the attention logits of a model are made of at one time, one entry for each layer."""

    read: list[Tensor]  # what the layer reads, (B, N, D)
    content: list[Tensor]  # x W_Q W_K^T x^T / sqrt(d) of it, (B, H, N, N)
    bias: list[Tensor]  # log sigmoid(M), (N, N) or (H, N, N), or a 0 without a mask


def content_logits(layer: MaskedAttention, x: Tensor) -> Tensor:
    """(B, N, D) -> (B, H, N, N): the logits without the mask."""
    query, key = layer.query_and_key(x)
    return query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5


@torch.no_grad()
def logit_parts(model: nn.Module, inputs: Tensor) -> LogitParts:
    """Of a model as it is now, evaluated on inputs."""
    layers, read = layers_of(model), read_by_layers(model, inputs)
    bias = [torch.zeros((), device=inputs.device) if layer.mask is None else
            F.logsigmoid(layer.mask) if layer.squash else layer.mask.clone() for layer in layers]
    return LogitParts(read, [content_logits(layer, x) for layer, x in zip(layers, read, strict=True)], bias)


@torch.no_grad()
def logit_changes(start: LogitParts, model: nn.Module, inputs: Tensor, causal: bool = False) -> list[dict[str, Tensor]]:
    """How far the attention logits of each layer have moved since `start`, and by what: (B, H, N, N) each.

        mask      log sigmoid(M) now, less what it was
        weights   W_Q and W_K now and then, on what the layer read at the start
        inputs    what the layer reads now and then, by W_Q and W_K of now
        all       their sum: logits now, less what they were

    Each row is centred over what it can see, for softmax ignores a constant; what it cannot see is 0.
    """
    now, changes = logit_parts(model, inputs), []
    for layer, read, content, bias, content_now, bias_now in zip(
            layers_of(model), start.read, start.content, start.bias, now.content, now.bias, strict=True):
        between = content_logits(layer, read)  # weights of now on the inputs of the start
        parts = {"mask": bias_now - bias, "weights": between - content, "inputs": content_now - between}
        visible = torch.ones_like(content[0, 0]).tril() if causal else torch.ones_like(content[0, 0])  # (N, N)
        for name, part in parts.items():
            part = part.expand_as(content)
            parts[name] = (part - (part * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)) * visible
        changes.append(parts | {"all": parts["mask"] + parts["weights"] + parts["inputs"]})
    return changes


def mechanism(start: LogitParts, model: nn.Module, inputs: Tensor, supports: list[Tensor],
              causal: bool = False) -> dict:
    """What a point of the curve says of the mechanism, lists with one entry a layer; [open, closed] pairs apart.

    moved: {mask, weights, inputs, all -> root mean square of `logit_changes`}. gradient: of the last backward pass, see
    `gradient_sizes`. bound_share: how much of Corollary 1's bound p_i sigma(-m_j) the derivative |dp_i/dm_j| uses,
    p_i |delta_ij - p_j| sigma(-m_j), both summed over i: 2 p_j (1 - p_j), weighted by sigma(-m_j).
    """
    moved: dict[str, list] = {"mask": [], "weights": [], "inputs": [], "all": []}
    shares: list[list[float] | None] = []
    for changes, attention, layer, support in zip(logit_changes(start, model, inputs, causal),
                                                  attention_maps(model, inputs), layers_of(model), supports):
        pairs = with_prior(support, layer.heads, causal)
        for name, change in changes.items():
            moved[name].append([rounded(change.cpu()[:, chosen].square().mean().sqrt()) for chosen in pairs])
        if layer.mask is None:
            shares.append(None)
            continue
        logits = layer.mask.detach().cpu().expand(attention.shape[1:])
        slope = torch.sigmoid(-logits) if layer.squash else torch.ones_like(logits)  # (H, N, N)
        used = slope * (2 * attention * (1 - attention)).mean(0)
        shares.append([rounded(used[chosen].sum() / slope[chosen].sum()) for chosen in pairs])
    return {"moved": moved, "gradient": gradient_sizes(model, supports, causal), "bound_share": shares}


def gradient_sizes(model: nn.Module, supports: list[Tensor], causal: bool = False) -> dict[str, list]:
    """Root mean square of dL/dM ([open, closed]), dL/dW_Q and dL/dW_K, one a layer; None where nothing is trained."""
    sizes: dict[str, list] = {"mask": [], "query": [], "key": []}
    for layer, support in zip(layers_of(model), supports, strict=True):
        for name in ("query", "key"):
            gradient = getattr(layer, name).weight.grad
            sizes[name].append(None if gradient is None else rounded(gradient.square().mean().sqrt()))
        if layer.mask is None or layer.mask.grad is None:
            sizes["mask"].append(None)
        else:  # a mask that the heads share has one entry for all of them
            pairs = with_prior(support, layer.heads, causal)
            gradient = layer.mask.grad.cpu().expand(pairs[0].shape)
            sizes["mask"].append([rounded(gradient[chosen].square().mean().sqrt()) for chosen in pairs])
    return sizes


def rounded(value: Tensor) -> float:
    """Four significant digits: a result line holds hundreds of these."""
    return float(f"{value.item():.4g}")
