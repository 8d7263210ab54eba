"""What people use in place of a mask: a bias for each relative position, gated positional attention, rotary positions.

All say how tokens lie to each other, as a mask of nearness does; sigmoid(M) as a factor is here too, for comparison.
A `MaskedAttention` has a place for two of them:

    layer.position_bias = RelativeBias(distance_index(64), heads)    # T5's, and Swin's with offset_index(side)
    layer.rotate = rotary                                            # query and key turned by their positions

`ConvNet` is the yardstick of vision: what knows that neighbours matter, and that all places are alike, by its make.
Shapes: B batch, N tokens, H heads, Dh width of a head, K numbers that a head learns, S side of an image.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tinymask.attention import MaskedAttention, attention_weights


class RelativeBias(nn.Module):
    """A learned number for each head and relative position, added to the logits as it is.

    Of T5 (arXiv 1910.10683) and, for patches, Swin (2103.14030). Each layer has its own here; T5's layers share one.
    index (N, N), int64: which of a head's K = index.max() + 1 numbers a pair has. `table` (H, K) starts at zero, that
    is as plain attention. Called with n <= N tokens: (H, n, n). Raises ValueError for more.
    """

    index: Tensor

    def __init__(self, index: Tensor, heads: int):
        super().__init__()
        self.register_buffer("index", index, persistent=False)
        self.table = nn.Parameter(torch.zeros(heads, int(index.max()) + 1))  # (H, K)

    def forward(self, tokens: int) -> Tensor:
        if tokens > len(self.index):
            raise ValueError(f"{tokens} tokens, the position bias is for {len(self.index)}")
        # table[:, index], but its gradient is the same to the last bit with any number of threads
        return F.embedding(self.index[:tokens, :tokens], self.table.T).permute(2, 0, 1)  # (H, n, n)


def distance_index(tokens: int) -> Tensor:
    """For causal language: pair (i, j) has number i - j, T5's idea without its buckets. (N, N).

    What lies ahead has number 0, and is hidden.

    >>> distance_index(3).tolist()
    [[0, 0, 0], [1, 0, 0], [2, 1, 0]]
    """
    n = torch.arange(tokens)
    return (n[:, None] - n).clamp(min=0)


def offset_index(side: int) -> Tensor:
    """For a square of patches, row by row: a number for each of the (2 side - 1)^2 offsets (down, right). (N, N).

    Offset (a, b) from query to key, in patches, has number (a + side - 1) (2 side - 1) + b + side - 1.

    >>> offset_index(2).tolist()
    [[4, 5, 7, 8], [3, 4, 6, 7], [1, 2, 4, 5], [0, 1, 3, 4]]
    """
    down, right = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)  # (N,) each
    return (down - down[:, None] + side - 1) * (2 * side - 1) + right - right[:, None] + side - 1


class Locality(nn.Module):
    """Where the heads of a `GatedAttention` look by position alone, and how much they do.

    `place` (H, 3) is v of the formula there, `gate` (H,) the gate. Called: v . r of every pair, (H, N, N).
    """

    relative: Tensor

    def __init__(self, side: int, offsets: list[tuple[int, int]]):
        super().__init__()
        down, right = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)  # (N,) each
        offset = torch.stack([down - down[:, None], right - right[:, None]], dim=-1).float()  # (N, N, 2)
        squares = offset.square().sum(dim=-1, keepdim=True)
        self.register_buffer("relative", torch.cat([squares, offset], dim=-1), persistent=False)  # r, (N, N, 3)
        self.place = nn.Parameter(torch.tensor([[-1.0, 2.0 * down, 2.0 * right] for down, right in offsets]))
        self.gate = nn.Parameter(torch.ones(len(offsets)))

    def forward(self) -> Tensor:
        return (self.relative @ self.place.T).permute(2, 0, 1)  # (H, N, N)


class GatedAttention(MaskedAttention):
    """ConViT's gated positional self-attention, with its start as a convolution (arXiv 2103.10697).

        weights = (1 - sigmoid(gate)) softmax(Q K^T / sqrt(d)) + sigmoid(gate) softmax(v . r),   gate and v of a head

    r = (down^2 + right^2, down, right) is the offset from query to key, in patches. v starts at -(1, -2 a, -2 b) for a
    head whose own offset is (a, b), so that it looks there with a weight that falls as exp(-distance^2); gate starts at
    1. offsets: (down, right), one for each head; the paper has those of a square window. N is side^2 patches.

    Left out of the paper: value projections that start at the identity (here every init starts from the same), another
    locality strength than 1, plain attention in the last layers, and the class token that joins there. Raises
    ValueError for an input of another length, and when a mask is set.
    """

    def __init__(self, dim: int, side: int, offsets: list[tuple[int, int]]):
        super().__init__(dim, len(offsets))
        self.position_bias: Locality = Locality(side, offsets)

    def weights(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, H, N, N)."""
        position, gate = self.position_bias().softmax(dim=-1), self.position_bias.gate.sigmoid()[:, None, None]
        if self.mask is not None or x.shape[1] != position.shape[-1]:
            raise ValueError(f"gated attention is for {position.shape[-1]} patches without a mask")
        query, key = self.query_and_key(x)  # (B, H, N, Dh) each
        return (1 - gate) * attention_weights(query, key) + gate * position


def rotary(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Queries or keys turned by their positions 0 ... N - 1 (arXiv 2104.09864): (B, H, N, Dh) -> the same.

    Columns 2k and 2k + 1 are a pair; at position n it is turned by n base^(-2k / Dh) radians, so that a query and a key
    know of their positions the difference alone. Raises ValueError for an odd Dh.
    """
    tokens, width = x.shape[-2:]
    if width % 2:
        raise ValueError(f"rotary positions turn pairs of columns; wanted an even head_dim, got {width}")
    speed = base ** -(torch.arange(0, width, 2, device=x.device) / width)  # (Dh / 2,)
    angle = torch.arange(tokens, device=x.device)[:, None] * speed  # (N, Dh / 2)
    cos, sin, a, b = angle.cos(), angle.sin(), x[..., 0::2], x[..., 1::2]  # a, b: (B, H, N, Dh / 2)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


class HadamardAttention(MaskedAttention):
    """sigmoid(M) times the softmax of the logits, which App. B of the paper argues against: rows no longer sum to 1.

    It has the parameters of a MaskedAttention, which becomes one by `layer.__class__ = HadamardAttention`.
    """

    def weights(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, H, N, N)
        query, key = self.query_and_key(x)  # (B, H, N, Dh) each
        plain = attention_weights(query, key, causal=self.causal)
        return plain if self.mask is None else plain * self.mask.sigmoid()


class ConvNet(nn.Module):
    """A small convolutional net, images (B, 3, S, S) -> class scores (B, classes).

    Three stages, each of which doubles the channels, halves the side and adds a residual branch, as in small nets for
    CIFAR-10 (ResNet-9). width: channels of the last stage; the first convolution has an eighth. Norms are over a whole
    image: nothing depends on the rest of the batch.
    """

    def __init__(self, *, classes: int, width: int):
        super().__init__()
        channels = [max(1, width // part) for part in (8, 4, 2, 1)]
        self.stem = convolution(3, channels[0])
        self.widen = nn.ModuleList(convolution(a, b) for a, b in zip(channels, channels[1:]))
        self.branch = nn.ModuleList(nn.Sequential(convolution(c, c), convolution(c, c)) for c in channels[1:])
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)  # (B, width / 8, S, S)
        for widen, branch in zip(self.widen, self.branch):
            x = F.max_pool2d(widen(x), 2, ceil_mode=True)
            x = x + branch(x)
        return self.head(x.mean(dim=(2, 3)))  # (B, width, S / 8, S / 8) -> (B, width) -> (B, classes)


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    """3 x 3, norm, GELU: (B, inputs, S, S) -> (B, outputs, S, S)."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(1, outputs), nn.GELU())


def convnet_width(parameters: int) -> int:
    """The width at which a ConvNet has about so many: the nine convolutions of the stages have 29.5 width^2."""
    return round((parameters / (9 * (1 / 32 + 2 / 16 + 1 / 8 + 2 / 4 + 1 / 2 + 2))) ** 0.5)
