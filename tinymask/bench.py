"""What a mask costs: `python -m tinymask.bench`, speeds as ratios measured in one run.

First table: a training step of a transformer with masks and of the same one without, in turn, so that both meet the
same machine; the overhead is the ratio of the two times minus one, its median and quartiles. Memory is what the
resident set of a new process grows by at most over three steps. Second table: the small language model with a mask for
each head, against the same model with `F.scaled_dot_product_attention` in place of our formula: with the same masks,
and without any, where torch has a fused kernel.
"""
import argparse
import functools
import multiprocessing
import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from tinymask import records, runs
from tinymask.attention import MaskedAttention
from tinymask.transformer import GPT, Block, Transformer, init_weights, parameter_groups

SIZES = [  # batch, tokens, dim, depth, heads
    (128, 15, 48, 2, 3), (16, 64, 192, 2, 3), (64, 64, 192, 2, 3), (16, 196, 192, 2, 3), (16, 256, 192, 2, 3)]
LANGUAGE = [(16, 64), (8, 128), (4, 256), (2, 512), (1, 1024)]  # batch, block: 1,024 tokens each


class LibraryAttention(nn.Module):
    """A MaskedAttention whose formula is the library's: what a user would write instead."""

    def __init__(self, layer: MaskedAttention):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D)
        layer, tokens = self.layer, x.shape[1]
        query, key, value = (project(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2)  # (B, H, N, Dh)
                             for project in (layer.query, layer.key, layer.value))
        bias = None
        if layer.mask is not None:
            future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            bias = F.logsigmoid(layer.mask).masked_fill(future, float("-inf"))
        output = F.scaled_dot_product_attention(query, key, value, bias, is_causal=bias is None)
        return layer.out(output.transpose(1, 2).flatten(2))


def training_step(model: nn.Module, loss: Callable[[], Tensor], shape: tuple | None = None,
                  library: bool = False) -> Callable[[], None]:
    """A function that does one training step of a model down a loss. shape: of a random mask in every layer; library:
    with `LibraryAttention`."""
    generator = runs.generator(0, "bench")
    init_weights(model, generator)
    for block in [block for block in model.modules() if isinstance(block, Block)]:
        if shape:
            block.attention.set_mask(torch.randn(shape, generator=generator))
        if library:
            block.attention = LibraryAttention(block.attention)  # type: ignore[assignment]
    optimizer = torch.optim.Adam(parameter_groups(model, lr=1e-4, mask_lr=1e-4, weight_decay=0.0))

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def transformer_step(size: tuple, masked: bool) -> Callable[[], None]:
    """A step of a transformer of this size, masked or plain."""
    batch, tokens, dim, depth, heads = size
    model, x = Transformer(dim=dim, depth=depth, heads=heads), torch.rand(batch, tokens, dim)
    return training_step(model, lambda: model(x).square().mean(), (tokens, tokens) if masked else None)


def language_step(batch: int, block: int, masked: bool, library: bool) -> Callable[[], None]:
    """A step of the small model of train_lm.py: bytes, width 96, 3 layers, 4 heads of 24, a mask for each head."""
    model = GPT(vocabulary=256, block=block, dim=96, depth=3, heads=4, head_dim=24)
    ids = torch.randint(256, (batch, block))
    return training_step(model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
                         (4, block, block) if masked else None, library)


def peak_mb(size: tuple, masked: bool) -> float:
    """Growth of the peak resident set over three steps, in MB; for a process of its own. 0 on Windows."""
    transformer_step((1, 2, 4, 1, 1), masked)()  # what the libraries load at the first step
    before = records.peak_rss_mb() or 0.0
    step = transformer_step(size, masked)
    for _ in range(3):
        step()
    return (records.peak_rss_mb() or 0.0) - before


def memory(size: tuple) -> list[float]:
    """`peak_mb` of plain and masked, each in a new process."""
    megabytes = []
    for masked in (False, True):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=signal.signal,
                                 initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:  # Ctrl-C is for this process alone
            megabytes.append(pool.submit(peak_mb, size, masked).result())
    return megabytes


def times(steps: list[Callable[[], None]], repeats: int) -> list[list[float]]:
    """Seconds of each step, `repeats` times in turn, after three rounds that do not count."""
    rounds: list[list[float]] = []
    for _ in range(3 + repeats):
        rounds.append([])
        for step in steps:
            start = time.perf_counter()
            step()
            rounds[-1].append(time.perf_counter() - start)
    return [list(column) for column in zip(*rounds[3:])]


def main(argv: list[str] | None = None) -> list:
    """Print the two tables. No runs are made, so none is returned."""
    flags = argparse.ArgumentParser(prog="tinymask.bench", description=__doc__, allow_abbrev=False,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.error = runs.fail  # type: ignore[assignment]
    flags.add_argument("--repeats", type=runs.number(int, 2), default=60, help="rounds of steps (default: 60)")
    args = flags.parse_args(argv)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.repeats} rounds of steps a size")
    rows = []
    for size in tqdm(SIZES, desc="masked against plain", disable=None, leave=False):
        plain, masked = times([transformer_step(size, masked) for masked in (False, True)], args.repeats)
        low, middle, high = (100 * (q - 1) for q in statistics.quantiles((b / a for a, b in zip(plain, masked)), n=4))
        rows.append([*size[:2], f"{1e3 * statistics.median(plain):.1f}", f"{middle:+.1f} %",
                     f"{low:+.1f} to {high:+.1f} %", *(f"{mb:.0f}" for mb in memory(size))])
    print(runs.table(["batch", "tokens", "plain ms", "overhead", "quartiles", "plain MB", "masked MB"], rows))
    rows = []
    for batch, block in tqdm(LANGUAGE, desc="against the library", disable=None, leave=False):
        make = functools.partial(language_step, batch, block)
        ours, same, none = times([make(True, False), make(True, True), make(False, True)], args.repeats)
        speed = [statistics.median(b / a for a, b in zip(ours, other)) for other in (same, none)]
        rows.append([batch, block, f"{batch * block / statistics.median(ours):,.0f}", *(f"{s:.2f}" for s in speed)])
    print(runs.table(["batch", "block", "masked tokens/s", "of the library's", "of the library's without masks"], rows))
    return []


if __name__ == "__main__":
    runs.command(main)
