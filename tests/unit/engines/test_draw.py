import pytest
import torch

from retrain.engines.step import BLOCK, draw, inverse


def uniforms(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("exact_sums", [False, True])
@pytest.mark.parametrize("size", [BLOCK, BLOCK + 1, 50_257])
def test_the_token_is_the_one_of_the_inverse_in_float64(size, exact_sums):
    """Up to rounding at the borders between tokens; log-probability and entropy are those of the softmax."""
    logits = 3 * torch.randn(100, size, generator=torch.Generator().manual_seed(size))
    u = uniforms(100)
    token, logprob, entropy, _ = draw(logits, u, exact_sums=exact_sums)
    probs = torch.softmax(logits.double(), -1)
    below = probs.cumsum(-1)
    exact = torch.searchsorted(below, u[:, None], right=True)[:, 0].clamp_(max=size - 1)
    near = (below.gather(1, exact[:, None])[:, 0] - u).minimum(u - (below - probs).gather(1, exact[:, None])[:, 0])
    assert bool(((token == exact) | (near < 1e-5)).all())
    assert (token == exact).float().mean() > 0.98
    chosen = probs.gather(1, token[:, None])[:, 0].log()
    torch.testing.assert_close(logprob.double(), chosen, rtol=0, atol=5e-6)
    torch.testing.assert_close(entropy.double(), -(probs * probs.log()).sum(-1), rtol=0, atol=5e-6)


@pytest.mark.parametrize("exact_sums", [False, True])
@pytest.mark.parametrize("size", [2 * BLOCK, 3 * BLOCK + 17])
def test_tokens_without_mass_are_never_drawn(size, exact_sums):
    """At the ends of the interval, at every border of a block, and where whole blocks have no mass."""
    generator = torch.Generator().manual_seed(3)
    mass = torch.rand(300, size, generator=generator) ** 8
    mass[torch.rand(300, size, generator=generator) < 0.9] = 0
    mass[:100, :BLOCK] = 0
    mass[100:200, -BLOCK:] = 0
    mass[:, BLOCK + 3] = 1e-6
    mass[:, 0] = mass[:, -1] = 0
    below = mass.double().cumsum(-1)
    edges = [below[:, place] / below[:, -1] for place in range(BLOCK - 1, size, BLOCK)]
    for share in (torch.zeros(300), torch.full((300,), 1 - 2.0**-53, dtype=torch.float64), *edges, uniforms(300, 4)):
        for nudge in (-1e-7, -1e-9, 0.0, 1e-9, 1e-7):
            u = (share.double() + nudge).clamp(0, 1 - 2.0**-53)
            token, total = inverse(mass, u[:, None], exact_sums)
            assert bool((mass.gather(1, token) > 0).all())
            torch.testing.assert_close(total[:, 0].double(), below[:, -1], rtol=1e-5, atol=0)


def test_rows_in_chunks_are_rows_at_once():
    logits, u = torch.randn(23, 3000, generator=torch.Generator().manual_seed(5)), uniforms(23)
    temperature = torch.linspace(0.5, 1.5, 23)[:, None]
    greedy = (torch.arange(23) % 5 == 0)[:, None]
    cut = torch.tensor([[20.0, 0.9, 0.0]]).repeat(23, 1)
    arguments = (logits, u, temperature, greedy, False, cut, torch.arange(20))
    whole, parts = draw(*arguments, chunk=1 << 30), draw(*arguments, chunk=7000)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[0][::5], logits[::5].argmax(-1))
