"""What a mask costs: masked against plain attention, `python -m tinymask.bench`.

One training step (forward, backward, Adam) of a transformer with masks and of the same one without, in
one process, in turn, so that both meet the same machine. The overhead is the ratio of the two times minus
one: the median over pairs of steps, and the quartiles. Memory is what the resident set of a new process
grows by at most, over three steps. Sizes: the Boolean section's, and 64, 196 and 256 tokens at the width
of ViT-Tiny. A second table has the tokens a second of the small language model, for growing blocks.
"""
import argparse
import multiprocessing
import signal
import statistics
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F
from tqdm import tqdm

from tinymask import records, runs
from tinymask.transformer import GPT, Transformer, init_weights, parameter_groups

SIZES = [  # batch, tokens, dim, depth, heads, head_dim
    (128, 15, 48, 2, 3, 16),
    (16, 64, 192, 2, 3, 64),
    (64, 64, 192, 2, 3, 64),
    (16, 196, 192, 2, 3, 64),
    (16, 256, 192, 2, 3, 64),
]
LANGUAGE = [(16, 64), (8, 128), (4, 256), (2, 512), (1, 1024)]  # batch, block: 1,024 tokens each


def training_step(size, masked):
    """A function that does one training step of a transformer, masked or plain."""
    generator = runs.generator(0, "bench")
    batch, tokens, dim, depth, heads, head_dim = size
    model = init_weights(Transformer(dim, depth, heads, head_dim), generator)
    if masked:
        set_masks(model, (tokens, tokens), generator)
    x = torch.randn(batch, tokens, dim, generator=generator)
    return step_of(model, lambda: model(x).square().mean())


def language_step(batch, block, masked):
    """The same for the small model of train_lm.py: bytes, width 96, 3 layers, 4 heads of 24, a mask for each head."""
    generator = runs.generator(0, "bench")
    model = init_weights(GPT(256, block, 96, 3, 4, 24), generator)
    if masked:
        set_masks(model.transformer, (4, block, block), generator)
    ids = torch.randint(256, (batch, block), generator=generator)
    return step_of(model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))


def set_masks(transformer, shape, generator):
    """A random mask of this shape in every layer."""
    for block in transformer.blocks:
        block.attention.set_mask(torch.randn(shape, generator=generator))


def step_of(model, loss):
    """A function that takes one Adam step down the loss, a function too."""
    optimizer = torch.optim.Adam(parameter_groups(model, 1e-4, 1e-4, 0.0))

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def seconds(step):
    """How long one step takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak_mb(size, masked):
    """Growth of the peak resident set over three steps, in MB; for a process of its own. None on Windows."""
    training_step((1, 2, 4, 1, 1, 4), masked)()  # what the libraries load at the first step
    before = records.peak_rss_mb()
    step = training_step(size, masked)
    for _ in range(3):
        step()
    return before and records.peak_rss_mb() - before


def memory(size):
    """`peak_mb` of plain and masked, each in a new process."""
    megabytes = []
    for masked in (False, True):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for this process alone
            future = pool.submit(peak_mb, size, masked)
            signal.signal(signal.SIGINT, handler)
            megabytes.append(future.result())
    return megabytes


def overhead(plain, masked, repeats):
    """Median time of a plain step in ms, then quartile, median and quartile of the overhead in percent."""
    for step in (plain, masked) * 3:  # warm up
        step()
    pairs = []
    for _ in range(repeats):
        if runs.interrupted():  # Ctrl-C
            raise KeyboardInterrupt
        pairs.append((seconds(plain), seconds(masked)))
    plain_ms = 1e3 * statistics.median(a for a, _ in pairs)
    return [plain_ms, *(100 * (q - 1) for q in statistics.quantiles((b / a for a, b in pairs), n=4))]


def main(argv=None):
    """Print the table. No runs are made, so none is returned."""
    flags = argparse.ArgumentParser(prog="tinymask.bench", description=__doc__, allow_abbrev=False,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.error = runs.fail
    flags.add_argument("--repeats", type=runs.whole(2), default=60, help="pairs of steps (default: 60)")
    args = flags.parse_args(argv)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.repeats} pairs of steps a size")
    header = ["batch", "tokens", "plain ms", "overhead", "quartiles", "plain MB", "masked MB"]
    megabytes = [memory(size) for size in tqdm(SIZES, desc="memory", disable=None, leave=False)]
    rows = []
    for size, (plain, masked) in zip(tqdm(SIZES, desc="time", disable=None, leave=False), megabytes):
        ms, low, middle, high = overhead(*(training_step(size, masked) for masked in (False, True)), args.repeats)
        rows.append([*size[:2], f"{ms:.1f}", f"{middle:+.1f} %", f"{low:+.1f} to {high:+.1f} %",
                     runs.mean_std([plain], 0), runs.mean_std([masked], 0)])
    print(runs.table(header, rows))
    rows = []
    for batch, block in tqdm(LANGUAGE, desc="language", disable=None, leave=False):
        ms, _, middle, _ = overhead(*(language_step(batch, block, masked) for masked in (False, True)), args.repeats)
        plain = 1e3 * batch * block / ms
        rows.append([batch, block, f"{plain:,.0f}", f"{plain / (1 + middle / 100):,.0f}"])
    print(runs.table(["batch", "block", "plain tokens/s", "masked tokens/s"], rows))
    return []


if __name__ == "__main__":
    runs.command(main)
