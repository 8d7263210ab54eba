"""How much of a prior training leaves: the paper's claim, measured in every run. Needs only torch.

Shapes: B batch, N tokens, H heads. Maps are a list with the attention of each layer, (B, H, N, N), as the models
return it; a support, (N, N) or (H, N, N), is 1 where the prior lets row i look at column j. Mask logits are the
paper's M, attention is its softmax(...).
"""
import torch


@torch.no_grad()
def attention_maps(model, inputs):
    """What a model attends to, evaluated: one (B, H, N, N) for each layer, on the CPU."""
    training = model.training
    model.eval()
    maps = [attention.cpu() for attention in model(inputs, return_attention=True)[1]]
    model.train(training)
    return maps


def snapshot(model, inputs):
    """What is compared before and after training: attention maps and mask logits, a list of each, one a layer."""
    # the rule of transformer.masks, written again so that this file needs only torch
    logits = [p.detach().cpu().clone() for name, p in model.named_parameters() if name.split(".")[-1] == "mask"]
    return attention_maps(model, inputs), logits


def measures(first, last, supports=None, causal=False):
    """What a result line says of two snapshots: support_mass_init and _final (lists of floats, one a layer, left
    out without supports), attention_shift (a float), mask_drift (a float, None without masks)."""
    mass = {} if supports is None else {
        "support_mass_init": support_mass(first[0], supports, causal),
        "support_mass_final": support_mass(last[0], supports, causal),
    }
    return mass | {"attention_shift": attention_shift(first[0], last[0]), "mask_drift": mask_drift(first[1], last[1])}


def support_mass(maps, supports, causal=False):
    """Attention on the support, for each layer: a mean over heads, inputs and the rows that have a prior.

    A row has none where its support is empty, or holds all that the row can see (all tokens; causal:
    those up to its own). Returns a list of floats, NaN for a layer without any such row.

    >>> uniform = torch.full((1, 1, 2, 2), 0.5)
    >>> support_mass([uniform], [torch.tensor([[0.0, 1.0], [1.0, 1.0]])])  # row 1 may look anywhere
    [0.5]
    """
    masses = []
    for attention, support in zip(maps, supports, strict=True):
        support = support.to(attention).expand(attention.shape[1:])  # (H, N, N)
        visible = torch.ones_like(support).tril() if causal else torch.ones_like(support)
        opened = (support * visible).sum(-1)
        says = (opened > 0) & (opened < visible.sum(-1))  # (H, N)
        masses.append((attention * support).sum(-1)[:, says].mean().item())
    return masses


def attention_shift(first, last):
    """Total variation between the attention of two models, half the L1 distance of two rows; a mean, in [0, 1].

    >>> attention_shift([torch.eye(2)[None, None]], [torch.full((1, 1, 2, 2), 0.5)])
    0.5
    """
    return sum((a - b).abs().sum(-1).mean().item() / 2 for a, b in zip(first, last, strict=True)) / len(first)


def mask_drift(first, last):
    """Mean absolute change of the finite mask logits M; None without masks. Lists of (N, N) or (H, N, N).

    >>> mask_drift([torch.zeros(2, 2)], [torch.tensor([[0.0, 1.0], [-1.0, 0.0]])])
    0.5
    """
    drift = [(b - a)[a.isfinite()].abs().mean().item() for a, b in zip(first, last, strict=True)]
    return sum(drift) / len(drift) if drift else None
