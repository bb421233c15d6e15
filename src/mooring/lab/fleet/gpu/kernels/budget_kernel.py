"""What a budget reads and writes of every run's parameters: two sums, and the pull."""

import triton
import triton.language as tl

__all__ = ["pull_back", "spent"]


@triton.jit
def spent(theta, anchor, previous, mu, done, out, count, blocks, first, B: tl.constexpr):
    """The two sums of `mooring.pulls.budget.spent_at` over each block of each run; nothing for runs that are done."""
    run, block = tl.program_id(1), tl.program_id(0)
    if tl.load(done + run) != 0:
        return
    at = block * B + tl.arange(0, B)
    there = at < count
    row = run.to(tl.int64) * count + at
    scores = tl.maximum(tl.load(previous + row, mask=there, other=0), 0)
    d = tl.load(theta + row, mask=there, other=0) - tl.load(anchor + row, mask=there, other=0)
    held = tl.load(mu + run).to(d.dtype) * scores + 1
    left = d / held
    each = scores * left * left
    place = (run.to(tl.int64) * blocks + first + block) * 2
    tl.store(out + place, tl.sum(each / 2, 0))
    tl.store(out + place + 1, tl.sum(each * (scores / held), 0))


@triton.jit
def pull_back(theta, anchor, previous, mu, count, B: tl.constexpr):
    """theta <- anchor + d / (1 + mu * F); nothing for runs within their budget."""
    run = tl.program_id(1)
    held = tl.load(mu + run)
    if held == 0:
        return
    at = tl.program_id(0) * B + tl.arange(0, B)
    there = at < count
    row = run.to(tl.int64) * count + at
    scores = tl.maximum(tl.load(previous + row, mask=there, other=0), 0)
    home = tl.load(anchor + row, mask=there, other=0)
    d = tl.load(theta + row, mask=there, other=0) - home
    tl.store(theta + row, home + d / (1 + held.to(d.dtype) * scores), mask=there)
