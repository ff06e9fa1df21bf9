"""What the scripts share: seeded data with one bad sample on request, and a last line that tells all weights apart."""

import hashlib
import os

import torch

torch.manual_seed(0)
torch.set_num_threads(1)

BAD = int(os.environ.get("NAN_AT", "-1"))


def batch(i, size=16, width=8, classes=None):
    """Batch `i`: inputs, and numbers or labels that follow from them; a bad one holds NaN in one sample."""
    source = torch.Generator().manual_seed(1000 + i)
    x = torch.randn(size, width, generator=source)
    y = x[:, :1] * 0.7 - x[:, 1:2] * 0.4 + 0.3 + 0.1 * torch.randn(size, 1, generator=source)
    if classes is not None:
        y = (y.squeeze(1) * 10).long() % classes
    if i == BAD:
        x[3] = float("nan")
    return x, y


def batches(num=30, **kinds):
    return (batch(i, **kinds) for i in range(num))


def tensors_of(thing):
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, dict):
        return [t for k in thing for t in tensors_of(thing[k])]
    if isinstance(thing, (list, tuple)):
        return [t for one in thing for t in tensors_of(one)]
    return tensors_of(thing.state_dict()) if hasattr(thing, "state_dict") else []


def ending(*things):
    """The last line: a digest of all that was trained, and whether it is finite."""
    found = [t.detach().cpu().contiguous() for t in tensors_of(list(things))]
    digest = hashlib.sha256()
    for t in found:
        digest.update((torch.view_as_real(t) if t.is_complex() else t).reshape(-1).view(torch.uint8).numpy().tobytes())
    print("sha256", digest.hexdigest())
    print("finite", all(bool(torch.isfinite(t).all()) for t in found))
