"""The query-key family: the same structure as `mask_priors`, written into the projections W_Q and W_K.

A support says where row i may look; here W_Q and W_K are chosen so that softmax(X W_Q W_K^T X^T / sqrt(d))
looks there at initialisation. Training may then do with them what it likes, which is the point of the
comparison: a mask keeps the structure apart from the content, these do not.

To be a fair rival the pattern must really be there at step 0, in every layer. The published methods solve for it on
position codes alone (svd: arXiv 2505.19985; opt: arXiv 2401.12511, 2404.01139), but what a layer reads is a sum of
token and position, normalised, and further down the output of other layers. So `svd` and `opt` here take the inputs X
that the layer really sees, on a batch of the task's own points; `impulse` and `mimetic` are as published.

Shapes: B batch, N tokens, D width, H heads, Dh head width. The paper's symbols: its W_Q and W_K, (D, d) for a
head, are transposed slices of `attention.query.weight` and `attention.key.weight`, its d is Dh, its X is x.
"""
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tinymask.attention import MaskedAttention


def position_decoder(x: Tensor, ridge: float = 0.0) -> Tensor:
    """Least-squares reader of the position, (B, N, D) -> P (D, N) with x_i P close to e_i.

    ridge: added to the diagonal of X^T X, as a share of its mean. Without it P reads directions in which the inputs
    hardly vary, with large weights; whatever training moves there is then blown up.

    Being least squares, it is blind to the directions in which the content of a token varies, so
    scores built on it depend on position alone: x_i P S P^T x_j = S_ij, whatever the tokens are.

    >>> x = torch.tensor([[[1.0, 0, 5], [0, 1, 5]], [[1, 0, 7], [0, 1, -7]]])  # position in columns 0, 1; content
    >>> position_decoder(x)[2].abs().max() < 0.05  # the content's column is hardly read
    tensor(True)
    """
    position = torch.eye(x.shape[1], dtype=torch.float64, device=x.device).repeat(len(x), 1)
    rows = x.double().flatten(0, 1)  # (B*N, D)
    if ridge == 0:
        return torch.linalg.pinv(rows, rtol=1e-5) @ position  # (D, B*N) @ (B*N, N)
    gram = rows.T @ rows
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    return torch.linalg.solve(gram, rows.T @ position)


def condition(x: Tensor, ridge: float = 0.0) -> float:
    """By how much `position_decoder` weighs the direction of x, (B, N, D), that varies least against the one that
    varies most: the square root of the condition of what it inverts.

    >>> condition(torch.diag(torch.tensor([1.0, 0.1]))[None])
    10.0
    """
    sizes = torch.linalg.svdvals(x.double().flatten(0, 1)).square()  # of X^T X
    if ridge == 0:
        sizes = sizes[sizes > 1e-10 * sizes[0]]
    sizes = sizes + ridge * sizes.mean()
    return round((sizes[0] / sizes[-1]).sqrt().item(), 3)


def svd(attention: MaskedAttention, x: Tensor, support: Tensor, gap: float = 10.0, ridge: float = 0.0) -> None:
    """Closed form: solve for W_Q W_K^T on the positions, then a truncated SVD.

    attention: the MaskedAttention to write to. x: (B, N, D), its inputs. support: (N, N) or (H, N, N). gap: difference
    in logits between open and closed pairs; 10 is what the mask's +10 / -10 makes. ridge: see `position_decoder`.

        W_Q W_K^T = sqrt(d) P S P^T,   S = gap * support, its rows centred (softmax ignores the mean)

    The product is cut to rank Dh, so a pattern is met exactly only if Dh is at least the rank of S.

    >>> from tinymask import MaskedAttention
    >>> layer, x = MaskedAttention(dim=2, heads=1), torch.eye(2)[None]
    >>> svd(layer, x, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    >>> layer.weights(x)[0, 0].round(decimals=3).abs().tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    heads, head_dim = attention.heads, attention.query.out_features // attention.heads
    decoder = position_decoder(x, ridge)  # (D, N)
    scores = gap * support.to(decoder).expand(heads, x.shape[1], x.shape[1])
    scores = scores - scores.mean(dim=-1, keepdim=True)
    product = head_dim**0.5 * decoder @ scores @ decoder.T  # (H, D, D)
    left, sizes, right = torch.linalg.svd(product, full_matrices=False)
    scale = sizes[:, None, :head_dim].sqrt()  # (H, 1, Dh)
    _write(attention, left[:, :, :head_dim] * scale, right.transpose(1, 2)[:, :, :head_dim] * scale)


def opt(attention: MaskedAttention, x: Tensor, support: Tensor, steps: int = 500, lr: float = 0.05,
        ridge: float = 0.0) -> None:
    """Gradient descent on the attention map between positions, from the weights that are there.

    Arguments as in `svd`. Adam on the cross-entropy between each row of the map and its support, made
    a distribution. (The published code takes the squared error, 1e-4 and 10,000 steps.) What is found
    acts on the inputs through the position decoder, W_Q = P A and W_K = P B. Draws nothing at random.
    """
    heads, tokens = attention.heads, x.shape[1]
    decoder = position_decoder(x, ridge)  # (D, N)
    target = support.to(decoder).expand(heads, tokens, tokens)
    target = target + (target.sum(dim=-1, keepdim=True) == 0)  # a row without support: attend to all
    target = target / target.sum(dim=-1, keepdim=True)  # (H, N, N)
    codes = x.double().mean(dim=0)
    codes = codes - codes.mean(dim=0)  # (N, D): what tells one position from another, on average
    query, key = (
        (codes @ layer.weight.detach().double().T).unflatten(-1, (heads, -1)).transpose(0, 1)
        .clone().requires_grad_()  # A and B, (H, N, Dh)
        for layer in (attention.query, attention.key)
    )
    optimizer = torch.optim.Adam([query, key], lr=lr)
    for _ in range(steps):
        logits = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5  # (H, N, N)
        loss = -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    _write(attention, decoder @ query.detach(), decoder @ key.detach())


def mimetic(attention: MaskedAttention, generator: torch.Generator, query_key: float = 0.7, value_out: float = 0.4,
            sign: int = -1) -> None:
    """What the projections of a trained transformer look like (arXiv 2305.09828), written down at the start.

        W_Q W_K^T ~ c Z + c I  for each head,  W_V W_O ~ c Z + sign c I  for all heads together

    with c = query_key and c = value_out; Z has uniform entries of variance 1/D. Each is factored by an SVD
    and cut to the rank there is. For vision sign is -1; for language it is +1 and query_key is negative, which
    turns both terms of that product.
    """
    heads, dim = attention.heads, attention.query.in_features
    head_dim = attention.query.out_features // heads

    def factors(count: int, scale: float, diagonal: float, rank: int) -> tuple[Tensor, Tensor]:
        noise = (2 * torch.rand(count, dim, dim, generator=generator, dtype=torch.float64) - 1) * (3 / dim) ** 0.5
        left, sizes, right = torch.linalg.svd(scale * noise + diagonal * torch.eye(dim))
        root = sizes[:, None, :rank].sqrt()
        return left[:, :, :rank] * root, right.transpose(1, 2)[:, :, :rank] * root  # (count, D, rank) each

    _write(attention, *factors(heads, query_key, query_key, head_dim))
    value, out = factors(1, value_out, sign * value_out, heads * head_dim)
    with torch.no_grad():
        missing = heads * head_dim - value.shape[-1]  # more head width than D: columns of zeros
        attention.value.weight.copy_(F.pad(value[0], (0, missing)).T)
        attention.out.weight.copy_(F.pad(out[0], (0, missing)))
        for layer in (attention.value, attention.out):
            if layer.bias is not None:
                layer.bias.zero_()


def impulse(attention: MaskedAttention, positions: Tensor, support: Tensor, norm: float = 7.0) -> None:
    """A pattern of attention between positions by SVD, as published for vision (arXiv 2505.19985 and its code).

    positions: (N, D), the position codes; the layer is taken to read their layer norm and nothing else.
    support: (H, N, N). W_Q W_K^T = P S P^T with P the pseudo-inverse of the codes, cut to the rank of a head,
    and each factor scaled to the Frobenius norm `norm`. (Left out of the published: noise on the zeros of S.)
    """
    heads, head_dim = attention.heads, attention.query.out_features // attention.heads
    decoder = torch.linalg.pinv(F.layer_norm(positions.detach().double(), positions.shape[-1:]), rtol=1e-5)  # (D, N)
    left, sizes, right = torch.linalg.svd(decoder @ support.to(decoder).expand(heads, -1, -1) @ decoder.T)
    total = sizes[:, :head_dim].sum(dim=-1, keepdim=True).clamp(min=1e-30)  # 0 at width 1
    root = (sizes / total).sqrt()[:, None, :head_dim] * norm
    _write(attention, left[:, :, :head_dim] * root, right.transpose(1, 2)[:, :, :head_dim] * root)


def apply_layerwise(method: Callable[..., None], model: Any, inputs: Tensor, supports: list[Tensor],
                    chosen: list[int] | None = None) -> None:
    """Set query and key of every layer of a model by `svd` or `opt`, first layer first.

    Each layer is solved on what the layers before it, already set, make of inputs: token ids (B, N), or images (B, 3,
    S, S) for a ViT; without dropout and drop path. supports: one for each layer. chosen: the layers that are set, from
    0; all by default. Nothing else in the model changes.
    """
    training = model.training
    model.eval()
    with torch.no_grad():
        x = model.embed(inputs)
    for layer, (block, support) in enumerate(zip(model.transformer.blocks, supports, strict=True)):
        if chosen is None or layer in chosen:
            method(block.attention, block.norm1(x).detach(), support)
        with torch.no_grad():
            x = block(x)
    model.train(training)


def _write(attention: MaskedAttention, query: Tensor, key: Tensor) -> None:
    """Set W_Q and W_K, given per head as (H, D, Dh), and their biases to zero."""
    with torch.no_grad():
        for layer, weight in ((attention.query, query), (attention.key, key)):
            missing = layer.out_features // attention.heads - weight.shape[-1]  # D < Dh: fewer columns
            weight = F.pad(weight, (0, missing))
            layer.weight.copy_(weight.transpose(1, 2).flatten(0, 1))  # (H * Dh, D)
            if layer.bias is not None:
                layer.bias.zero_()
