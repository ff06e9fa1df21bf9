"""A small denoising diffusion model on two moons: an MLP with sinusoidal embeddings, AdamW, clipping, an EMA copy."""

import copy

import torch
from shapes_common import ending, energy_distance, moons, start
from torch import nn
from torch.nn import functional as F


class SinusoidalEmbedding(nn.Module):
    def __init__(self, size, scale=1.0):
        super().__init__()
        self.size, self.scale = size, scale

    def forward(self, x):
        half = self.size // 2
        freq = torch.exp(torch.arange(half) * -(torch.log(torch.tensor(10000.0)) / (half - 1)))
        emb = (x * self.scale).unsqueeze(-1) * freq.unsqueeze(0)
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.ff, self.act = nn.Linear(size, size), nn.GELU()

    def forward(self, x):
        return x + self.act(self.ff(x))


class MLP(nn.Module):
    def __init__(self, hidden=64, layers=2, emb=16):
        super().__init__()
        self.time_mlp = SinusoidalEmbedding(emb)
        self.input_mlp1, self.input_mlp2 = SinusoidalEmbedding(emb, 25.0), SinusoidalEmbedding(emb, 25.0)
        self.joint_mlp = nn.Sequential(
            nn.Linear(3 * emb, hidden), nn.GELU(), *[Block(hidden) for _ in range(layers)], nn.Linear(hidden, 2)
        )

    def forward(self, x, t):
        x = torch.cat((self.input_mlp1(x[:, 0]), self.input_mlp2(x[:, 1]), self.time_mlp(t)), dim=-1)
        return self.joint_mlp(x)


class NoiseScheduler:
    def __init__(self, num_timesteps=50, beta_start=0.0001, beta_end=0.08):
        self.num_timesteps = num_timesteps
        self.betas = torch.linspace(beta_start, beta_end, num_timesteps)
        self.alphas = 1.0 - self.betas
        self.alphas_cumprod = torch.cumprod(self.alphas, axis=0)

    def add_noise(self, x_start, noise, t):
        keep = self.alphas_cumprod[t].reshape(-1, 1)
        return keep.sqrt() * x_start + (1 - keep).sqrt() * noise

    def step(self, pred_noise, t, sample):
        beta, alpha, cum = self.betas[t], self.alphas[t], self.alphas_cumprod[t]
        mean = (sample - beta / (1 - cum).sqrt() * pred_noise) / alpha.sqrt()
        return mean + (beta.sqrt() * torch.randn_like(sample) if t > 0 else 0)


@torch.no_grad()
def sample(model, scheduler, num=256):
    x = torch.randn(num, 2)
    for t in reversed(range(scheduler.num_timesteps)):
        x = scheduler.step(model(x, torch.full((num,), float(t))), t, x)
    return x


@torch.no_grad()
def update_ema(ema, model, decay):
    for a, b in zip(ema.parameters(), model.parameters(), strict=True):
        a.lerp_(b, 1 - decay)


def main():
    steps, seed = start()
    data = moons(4000, seed)
    model = MLP()
    ema = copy.deepcopy(model).requires_grad_(False)
    scheduler = NoiseScheduler()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = energy_distance(sample(ema, scheduler), data[:256])
    losses, global_step, epoch = [], 0, 0
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 64, shuffle=True, drop_last=True)
    while global_step < steps:
        model.train()
        for (batch,) in loader:
            noise = torch.randn(batch.shape)
            timesteps = torch.randint(0, scheduler.num_timesteps, (batch.shape[0],)).long()
            noisy = scheduler.add_noise(batch, noise, timesteps)
            noise_pred = model(noisy, timesteps)
            loss = F.mse_loss(noise_pred, noise)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            update_ema(ema, model, decay=0.99)
            losses.append(loss.detach().item())
            global_step += 1
            if global_step == steps:
                break
        print(f"epoch {epoch}: loss {sum(losses[-50:]) / len(losses[-50:]):.4f} step {global_step}")
        epoch += 1
    last = energy_distance(sample(ema, scheduler), data[:256])
    print(f"distance {first:.4f} -> {last:.4f}")
    ending(steps, last < 0.1 * first and sum(losses[-200:]) < 0.8 * 200, model, ema, optimizer, final=-last)


if __name__ == "__main__":
    main()
