"""What the tests of the scripts share: a training loop written from the paper, and how a script is run and compared."""
import math

import pytest
import torch
import torch.nn.functional as F

from tinymask import records, rivals, runs

# flags that tests/test_scripts.py moves, for all scripts
SHARED_FLAGS = {"help", "inits", "preset", "seeds", "first_seed", "device", "out", "smoke", "resume", "plot"}


def words(flags):
    """{"batch_size": 8, "bf16": True} -> ["--batch-size=8", "--bf16"]."""
    return [f"--{name.replace('_', '-')}" + f"={value}" * (value is not True) for name, value in flags.items()]


def refused(capsys, act, status=2):
    """The one line with which act() leaves."""
    with pytest.raises(SystemExit) as stop:
        act()
    error = capsys.readouterr().err
    assert stop.value.code == status and len(error.splitlines()) == 1, error
    return error


def checkpoint(out):
    """What the one run in a folder has saved."""
    (path,) = (out / "checkpoints").iterdir()
    return records.load(path)


def set_masks(model, init, masks):
    """What the names of inits say of M, one prior's logits for each layer (None: it has none)."""
    for block, mask in zip(model.transformer.blocks, masks):
        if mask is None:
            continue
        if init in ("bias", "alibi"):
            block.attention.set_mask(F.logsigmoid(mask) if init == "bias" else mask, init == "bias", squash=False)
        elif init == "hadamard":
            block.attention.set_mask(mask)
            block.attention.__class__ = rivals.HadamardAttention
        elif "mask" in init:
            mask = 0 * mask if init == "mask-zero" else mask
            block.attention.set_mask(mask, learnable=init not in ("mask-frozen", "mask-hard"))


def train(model, loss_of, f, seed, init="", optimizer=torch.optim.AdamW):
    """The optimiser's steps: half a cosine after a warm-up, no decay of M. loss_of(draws): of the next batch.

    f: the flags. Gives the weights, and the losses of all steps.
    """
    groups, losses, draws = ([], []), [], runs.generator(seed, "batches")
    frozen = {"svd-frozen": ("query", "key"), "opt-frozen": ("query", "key"), "mask-only": ("position",),
              "svd-fixed": ("query", "key", "token", "position", "blocks.0.norm1")}.get(init, ())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(part in name for part in frozen):
            groups[name.endswith(".mask") or ".position_bias." in name].append(parameter)
    decays, rates = (f["weight_decay"], f.get("mask_weight_decay", 0.0)), (f["lr"], f.get("mask_lr", f["lr"]))
    optimizer = optimizer([dict(params=group, weight_decay=decay) for group, decay in zip(groups, decays)])
    for step in range(f["steps"]):
        for group, rate in zip(optimizer.param_groups, rates):
            warm = min(1, (step + 1) / f.get("warmup", 20))
            group["lr"] = rate * warm * (1 + math.cos(math.pi * step / f["steps"])) / 2
        loss = loss_of(draws)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def assert_same(found, wanted):
    """Two state_dicts."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=2e-6, msg=lambda m, name=name: name + m)


def assert_moved(found, plain, result, usual, expected):
    """A flag changed the weights, and in the result line's config nothing but what is expected."""
    assert any(name not in plain or found[name].shape != plain[name].shape or not torch.equal(found[name], plain[name])
               for name in found)
    config = result["config"]
    changed = {name for name in usual if name in config and config[name] != usual[name]}
    assert changed - {"inits", "tasks", "dataset"} == expected
