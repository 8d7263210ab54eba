"""How much of a prior training leaves: the paper's claim, measured in every run.

Shapes: B batch, N tokens, H heads. Maps are a list with the attention weights of each layer, (B, H, N, N); a support,
(N, N) or (H, N, N), is 1 where the prior lets row i look at column j. Mask logits are the paper's M, attention is its
softmax(...).
"""
import torch
import torch.nn as nn
from torch import Tensor

from tinymask.attention import MaskedAttention, masks


@torch.no_grad()
def attention_maps(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """What a model attends to, evaluated: one (B, H, N, N) for each of its MaskedAttention layers, on the CPU."""
    maps: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda layer, read: maps.append(layer.weights(*read).cpu()))
             for layer in model.modules() if isinstance(layer, MaskedAttention)]
    training = model.training
    model.eval()
    try:
        model(inputs)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    return maps


def snapshot(model: nn.Module, inputs: Tensor) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """What is compared before and after training, one for each layer: attention maps, mask logits, norms of W_Q."""
    norms = [layer.query.weight.norm().item() for layer in model.modules() if isinstance(layer, MaskedAttention)]
    return attention_maps(model, inputs), [mask.detach().cpu().clone() for mask in masks(model).values()], norms


def measures(first: tuple, last: tuple, supports: list[Tensor] | None = None, causal: bool = False) -> dict:
    """What a result line says of two snapshots: support_mass_init and _final (lists of floats, one a layer, left
    out without supports), attention_shift (a float), mask_drift (a float, None without masks), query_norm_init and
    _final (Frobenius, lists of floats)."""
    mass = {} if supports is None else {
        "support_mass_init": support_mass(first[0], supports, causal),
        "support_mass_final": support_mass(last[0], supports, causal),
    }
    return mass | {"attention_shift": attention_shift(first[0], last[0]), "mask_drift": mask_drift(first[1], last[1]),
                   "query_norm_init": first[2], "query_norm_final": last[2]}


def support_mass(maps: list[Tensor], supports: list[Tensor], causal: bool = False) -> list[float]:
    """Attention on the support, for each layer: a mean over heads, inputs and the rows that have a prior.

    A row has none where its support is empty, or holds all that the row can see (all tokens; causal:
    those up to its own). NaN for a layer without any row that has one.

    >>> uniform = torch.full((1, 1, 2, 2), 0.5)
    >>> support_mass([uniform], [torch.tensor([[0.0, 1.0], [1.0, 1.0]])])  # row 1 may look anywhere
    [0.5]
    """
    masses = []
    for attention, support in zip(maps, supports, strict=True):
        support = support.to(attention).expand(attention.shape[1:])  # (H, N, N)
        visible = torch.ones_like(support).tril() if causal else torch.ones_like(support)
        opened = (support * visible).sum(-1)  # (H, N)
        has_prior = (opened > 0) & (opened < visible.sum(-1))  # (H, N)
        masses.append((attention * support).sum(-1)[:, has_prior].mean().item())
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
