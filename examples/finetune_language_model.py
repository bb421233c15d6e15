"""Fine-tune a small GPT from code to prose and measure what it forgets.

The data are on every machine: the standard library's code, and its documentation and licences. The model is trained on
the code once and stored in a folder. Then it is fine-tuned with each method. A method sees 32 batches of code, or text
that the model generates, before fine-tuning starts, and no code after that.

    python examples/finetune_language_model.py cache
    python examples/finetune_language_model.py cache --size large --device cuda --json out.json --figure out.png
"""

import argparse
import ast
import json
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import mooring
from mooring.rules import Kronecker


@dataclass(frozen=True)
class Size:
    """The size of a model and the length of its training."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int  # on the first domain
    lr: float
    tuning: int  # steps on the second
    tuning_lr: float


SIZES = {
    "tiny": Size(2, 32, 2, 32, 8, 60, 3e-3, 20, 1e-3),
    "small": Size(3, 128, 4, 64, 16, 1500, 3e-3, 150, 1e-3),
    "large": Size(8, 512, 8, 256, 64, 900, 6e-4, 300, 3e-4),
    "largest": Size(14, 864, 12, 256, 32, 1500, 4e-4, 150, 2e-4),  # 126 M
}

FISHER = mooring.EWC(decay=None, per_sample=True)
ESTIMATED = mooring.Budget(0.1, measured=False)
LEAN = mooring.Memory(current="none")  # no task follows this one, so its importance is not needed
METHODS = {
    "plain": None,
    "L2-SP 0.1": {"importance": "uniform", "pull": mooring.Penalty(0.1)},
    "L2-SP 1": {"importance": "uniform", "pull": mooring.Penalty(1.0)},
    "EWC 100": {"importance": FISHER, "pull": mooring.Penalty(100.0)},
    "EWC 1000": {"importance": FISHER, "pull": mooring.Penalty(1000.0)},
    "explicit": {"pull": mooring.Interpolation()},
    "explicit, stiffness 0.1": {"pull": mooring.Interpolation(stiffness=0.1)},
    "budget 0.03": {"pull": mooring.Budget(0.03), "memory": LEAN},
    "budget 0.1": {"pull": mooring.Budget(0.1), "memory": LEAN},
    "Kronecker 0.03": {"importance": Kronecker(), "pull": mooring.Budget(0.03), "memory": LEAN},
    "Kronecker 0.1": {"importance": Kronecker(), "pull": mooring.Budget(0.1), "memory": LEAN},
    "Kronecker 0.1, own text": {
        "importance": Kronecker(),
        "pull": mooring.Budget(0.1),
        "memory": LEAN,
        "reference": "own",
    },
    "estimated 0.1": {"pull": ESTIMATED, "memory": LEAN},
    "estimated Kronecker 0.1": {"importance": Kronecker(), "pull": ESTIMATED, "memory": LEAN},
    "estimated, own text": {"importance": Kronecker(), "pull": ESTIMATED, "memory": LEAN, "reference": "own"},
}

# The data


def read_domains(size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return code without docstrings, and prose, each as (training, held-out) characters, at most `size` of them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    code, prose = [], []
    for file in sorted(library.glob("*.py"))[: max(20, size // 10_000)]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                prose.append(text)
                node.body = node.body[1:] or [ast.Pass()]
        code.append(ast.unparse(tree))
    from pydoc_data.topics import topics

    prose += [text for _, text in sorted(topics.items())]
    prose += [file.read_text(encoding="utf-8") for file in sorted(library.glob("LICENSE*"))]
    domains = {}
    for name, texts in (("code", code), ("prose", prose)):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
        text = "\n\n".join(texts[i] for i in order).encode("ascii", "replace")[:size]
        characters = torch.tensor(list(text), dtype=torch.uint8)
        held_out = len(characters) // 10
        domains[name] = characters[held_out:], characters[:held_out]
    return domains


def batch_of(text: Tensor, size: Size, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of shape (batch, context) from random places of a text."""
    places = torch.randint(len(text) - size.context - 1, (size.batch, 1), generator=generator)
    rows = text[places + torch.arange(size.context + 1)].long().to(device)
    return rows[:, :-1], rows[:, 1:]


def batches_of(text: Tensor, size: Size, seed: int, count: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield so many batches, in the order of a seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield batch_of(text, size, generator, device)


# The model


class Block(nn.Module):
    """A transformer block made of linear layers, which have Kronecker factors."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions, width) to the same shape."""
        b, t, w = x.shape
        q, k, v = self.mix(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, w))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A language model of characters. The head is not tied to the embedding, so that each has its own curvature."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.context = size.context
        self.characters, self.places = nn.Embedding(128, size.width), nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 128)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * size.layers) ** 0.5 if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, positions) to logits of shape (batch, positions, 128)."""
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.characters(x) + self.places(places))))

    @torch.no_grad()
    def write(self, count: int) -> Tensor:
        """Generate texts of shape (count, context), each from the beginning of a line."""
        text = torch.full((count, 1), ord("\n"), device=self.head.weight.device)
        while text.shape[1] < self.context:
            probabilities = self(text)[:, -1].softmax(-1)
            text = torch.cat([text, torch.multinomial(probabilities, 1)], 1)
        return text


def loss_of(model: GPT, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss in nats per character."""
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def mean_loss(model: GPT, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Return the mean loss on held-out batches."""
    return sum(float(loss_of(model, batch)) for batch in batches) / len(batches)


# Training


def bar(steps: int, what: str) -> Iterator[int]:
    """Yield the steps, with a progress bar if standard error is a terminal."""
    start = time.monotonic()
    for step in range(steps):
        yield step
        if sys.stderr.isatty():
            left = (time.monotonic() - start) / (step + 1) * (steps - step - 1)
            done = 30 * (step + 1) // steps
            print(f"\r{what:26s}[{'=' * done:30s}] {left:5.0f} s left ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r" + " " * 80 + "\r", end="", file=sys.stderr, flush=True)


def pretrained(size: Size, text: Tensor, file: Path, device: str) -> GPT:
    """Return the model of the first domain from its file; train it and write the file if it is missing."""
    torch.manual_seed(0)
    model = GPT(size).to(device)
    if file.exists():
        model.load_state_dict(torch.load(file, map_location=device, weights_only=True))
        return model
    cuda = device.startswith("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, weight_decay=0.01, fused=cuda)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.lr, total_steps=size.steps, pct_start=0.1)
    batches = batches_of(text, size, 1, size.steps, device)
    for _ in bar(size.steps, "training on code"):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = loss_of(model, next(batches))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), file)
    return model


def finetune(name: str, size: Size, model: GPT, domains: dict[str, tuple[Tensor, Tensor]], device: str) -> dict:
    """Fine-tune on the second domain with one method; return the losses on both domains over the steps."""
    torch.manual_seed(0)
    held_out = {
        domain: [batch_of(texts[1], size, torch.Generator().manual_seed(n), device) for n in range(16)]
        for domain, texts in domains.items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.tuning_lr, weight_decay=0.0)
    start, moor = time.perf_counter(), None
    if METHODS[name] is not None:
        options = dict(METHODS[name])
        if options.get("reference") == "own":
            options["reference"] = lambda model: model.write(size.batch)  # the model also labels its own text
        else:
            options["reference"] = list(batches_of(domains["code"][0], size, 2, 32, device))
        moor = mooring.attach(model, optimizer, **options)
    estimating = time.perf_counter() - start
    batches, interval = batches_of(domains["prose"][0], size, 3, size.tuning, device), max(1, size.tuning // 10)
    history = []
    for step in bar(size.tuning + 1, name):
        if step == size.tuning and moor and getattr(options["pull"], "measured", False):
            moor.finish()  # return until the forgetting that is measured on code is within the budget
        if step % interval == 0:
            losses = {domain: mean_loss(model, batches) for domain, batches in held_out.items()}
            history.append({"step": step, **losses})
        if step == size.tuning:
            break
        optimizer.zero_grad()
        loss_of(model, next(batches)).backward()
        optimizer.step()
    return {"method": name, "curve": history, "seconds": time.perf_counter() - start, "estimating": estimating}


# Results


def table(runs: list[dict]) -> str:
    """Return a line for each method: the final loss on both domains and its change."""
    lines = [f"{'':26s}{'code':>8s}{'rise':>8s}{'prose':>8s}{'fall':>8s}{'seconds':>9s}"]
    for run in runs:
        first, last = run["curve"][0], run["curve"][-1]
        rise, fall = last["code"] - first["code"], first["prose"] - last["prose"]
        cells = f"{last['code']:8.3f}{rise:+8.3f}{last['prose']:8.3f}{fall:8.3f}{run['seconds']:9.1f}"
        lines.append(f"{run['method']:26s}{cells}")
    return "\n".join(lines)


def draw(runs: list[dict], file: Path) -> None:
    """Draw both losses over the steps, and the loss on code over the loss on prose."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    colours = pyplot.colormaps["tab20"].colors
    for run, colour in zip(runs, colours, strict=False):
        history = run["curve"]
        code, prose, steps = ([point[key] for point in history] for key in ("code", "prose", "step"))
        axes[0].plot(steps, code, color=colour)
        axes[1].plot(steps, prose, color=colour)
        axes[2].plot(prose, code, color=colour, alpha=0.5)
        axes[2].plot(prose[-1], code[-1], "o", color=colour, label=run["method"])
    for axis, title in zip(axes, ("code, which it knew", "prose, which it learns", "both"), strict=True):
        axis.set(title=title, xlabel="steps", ylabel="held-out loss, nats per character")
    axes[2].set(xlabel="loss on prose", ylabel="loss on code")
    axes[2].legend(fontsize=7)
    figure.savefig(file, dpi=120)


def main() -> None:
    """Train once, fine-tune with every method, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for the model of the first domain")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=list(METHODS),
        metavar="NAME",
        help="methods to run (default: all)",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the losses over the steps to this file")
    parser.add_argument("--figure", type=Path, help="draw the losses to this file; needs matplotlib")
    options = parser.parse_args()
    size, device = SIZES[options.size], options.device
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")
    domains = read_domains(200_000 if options.size == "tiny" else 10_000_000)
    file = options.folder / f"{options.size}.pt"
    start = time.perf_counter()
    model = pretrained(size, domains["code"][0], file, device)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e6:.2f} M parameters, {', '.join(f'{len(t[0])} characters of {d}' for d, t in domains.items())}")
    print(f"model of code ready after {time.perf_counter() - start:.0f} s", flush=True)
    runs = []
    for name in options.methods:
        model = pretrained(size, domains["code"][0], file, device)
        runs.append(finetune(name, size, model, domains, device))
        print(table(runs[-1:]).splitlines()[-1] if len(runs) > 1 else table(runs), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"size": options.size, **asdict(size), "runs": runs}, indent=1))
    if options.figure:
        draw(runs, options.figure)


if __name__ == "__main__":
    main()
