"""A small causal transformer, pre-norm with torch's default initialisation, and text from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class CharTransformer(nn.Module):
    """Tokens in, scores of the next token out.

    Example:
        >>> model = CharTransformer(num_tokens=11, width=16, depth=1, heads=2, hidden=32, max_seq=8)
        >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 11])
    """

    def __init__(self, *, num_tokens: int, width: int, depth: int, heads: int, hidden: int, max_seq: int) -> None:
        super().__init__()
        self.max_seq = max_seq
        self.tokens = nn.Embedding(num_tokens, width)
        self.places = nn.Embedding(max_seq, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores `[batch, length, num_tokens]`."""
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


@torch.no_grad()
def continue_text(
    model: CharTransformer, tokens: Sequence[int], *, num: int, temperature: float, seed: int
) -> list[int]:
    """The tokens with `num` more drawn from the model; mode and global random numbers stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    was, out = model.training, list(tokens)
    model.eval()
    try:
        device = next(model.parameters()).device
        for _ in range(num):
            scores = model(torch.tensor([out[-model.max_seq :]], device=device))[0, -1].float().cpu()
            if not bool(scores.isfinite().all()):
                break  # a model of NaN has nothing to say
            out.append(int(torch.multinomial((scores / temperature).softmax(0), 1, generator=generator)))
    finally:
        model.train(was)
    return out
