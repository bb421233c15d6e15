"""Tests of PEFT's adapters: LoRA of every kind through its product, the others by their own parameters."""

import pytest
import torch
from torch import nn

import mooring
from library.adapters.low_rank_nets import QuantizedLinear, batches, train, trainable
from mooring.errors import MooringError, UnheldWarning
from waiting import waiting_refused

pytest.importorskip("peft", reason="needs peft")

from peft import IA3Config, LoraConfig, OFTConfig, PromptTuningConfig, get_peft_model
from peft.tuners.lora import LoraLayer


def linear_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def lora(net=None, **options):
    return get_peft_model(net or linear_net(), LoraConfig(**{"r": 2, "target_modules": ["0", "2"], **options}))


def moored(model, data=None, lr=0.05, **options):
    optimizer = torch.optim.Adam(trainable(model), lr=lr)
    options = {"pull": mooring.Budget(0.01, measured=False), **options}
    return optimizer, mooring.attach(model, optimizer, reference=data or batches(), **options)


def hows(moor):
    return {entry.how for entry in moor.coverage().held}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 3)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.conv(x).relu().flatten(1))


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        conv1d = pytest.importorskip("transformers").pytorch_utils.Conv1D
        self.first, self.head = conv1d(6, 4), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.first(x).relu())


def token_batches(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randint(7, (16, 4), generator=g), torch.randint(3, (16,), generator=g)) for _ in range(count)]


def image_batches(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(16, 2, 4, 4, generator=g), torch.randint(3, (16,), generator=g)) for _ in range(count)]


KINDS = {
    "linear": (lambda: linear_net(), ["0", "2"], {}, batches),
    "rslora": (lambda: linear_net(), ["0", "2"], {"use_rslora": True, "lora_alpha": 8}, batches),
    "transposed": (Transposed, ["first"], {"fan_in_fan_out": True}, batches),
    "embedding": (Tokens, ["embed", "head"], {}, token_batches),
    "convolution": (Images, ["conv", "head"], {}, image_batches),
    "pissa": (lambda: linear_net(), ["0", "2"], {"init_lora_weights": "pissa"}, batches),
    "dora": (lambda: linear_net(), ["0", "2"], {"use_dora": True}, batches),
}


def delta(model, name):
    """Return what an adapter adds to the weights of a layer, as PEFT itself computes it."""
    return model.base_model.model.get_submodule(name).get_delta_weight("default").detach()


@pytest.mark.parametrize("kind", KINDS)
def test_budget_is_kept_on_every_kind_of_lora(kind):
    net, targets, options, data = KINDS[kind]
    torch.manual_seed(0)
    model = lora(net(), target_modules=targets, **options)
    optimizer, moor = moored(model, data(4))
    assert "product" in hows(moor)
    assert not moor.coverage().unheld
    train(model, optimizer, data(40, seed=5))
    assert 0.005 <= moor.pull_energy() <= 0.01 * (1 + 1e-4)


@pytest.mark.parametrize("kind", ["linear", "rslora", "transposed", "embedding", "convolution", "pissa"])
def test_energy_is_that_of_the_change_of_the_weights(kind):
    """The factors come from the saved state, and the change of the weights from PEFT."""
    net, targets, options, data = KINDS[kind]
    torch.manual_seed(0)
    model = lora(net(), target_modules=targets, **options).double()
    double = [(x.double() if x.is_floating_point() else x, y) for x, y in data(4)]
    _, moor = moored(model, double, adapters=mooring.Product(damping=0.0))
    before = {name: delta(model, name) for name in targets}
    with torch.no_grad():
        for p in trainable(model):
            p.add_(0.1 * torch.randn_like(p))
    state, expected = moor.state_dict(), 0.0
    for name in targets:
        d = delta(model, name) - before[name]
        d = d.T if kind == "transposed" or name == "embed" else d.flatten(1)
        keys = [key for key in state if key.startswith("past_") and f".{name}." in key]
        inputs, outputs = (state[key] for key in sorted(keys))
        inputs = torch.diag(inputs) if inputs.ndim == 1 else inputs
        expected += float(torch.trace(outputs @ d @ inputs @ d.T)) / 2
    assert moor.pull_energy() == pytest.approx(expected, rel=1e-9)


def test_convolution_factors_count_its_windows():
    model = lora(Images(), target_modules=["conv"]).double()
    x, y = image_batches(1)[0]
    _, moor = moored(model, [(x.double(), y)])
    windows = nn.functional.unfold(x.double(), 3, padding=1, stride=2).mT.flatten(0, 1)
    (inputs,) = (t for key, t in moor.state_dict().items() if key.startswith("past_inputs"))
    torch.testing.assert_close(inputs, windows.T @ windows / len(x))


def test_modules_to_save_are_ordinary_parameters():
    model = lora(target_modules=["0"], modules_to_save=["2"])
    _, moor = moored(model)
    by_name = {entry.name: entry.how for entry in moor.coverage().held}
    assert {how for name, how in by_name.items() if "modules_to_save" in name} == {"scores"}
    assert {how for name, how in by_name.items() if "lora" in name} == {"product"}


def test_dora_says_how_its_magnitudes_are_held():
    _, moor = moored(lora(use_dora=True))
    by_name = {entry.name: entry for entry in moor.coverage().held}
    magnitude = next(entry for name, entry in by_name.items() if "magnitude" in name)
    assert magnitude.how == "scores"
    assert "magnitudes of DoRA" in magnitude.reason


def test_ia3_says_what_its_scores_do_not_see():
    model = get_peft_model(linear_net(), IA3Config(target_modules=["0", "2"], feedforward_modules=[]))
    _, moor = moored(model)
    held = moor.coverage().held
    assert {entry.how for entry in held} == {"scores"}
    assert all("parameters of ia3 are held one by one" in entry.reason for entry in held)


def test_oft_says_what_its_scores_do_not_see():
    model = get_peft_model(linear_net(), OFTConfig(r=0, oft_block_size=2, target_modules=["0"]))
    optimizer, moor = moored(model)
    held = moor.coverage().held
    assert {entry.how for entry in held} == {"scores"}
    assert all("parameters of oft are held one by one" in entry.reason for entry in held)
    train(model, optimizer, batches(5, seed=5))
    assert moor.pull_energy() <= 0.01 * (1 + 1e-4)


def test_prompt_tuning_says_what_its_scores_do_not_see():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = get_peft_model(
        transformers.GPT2LMHeadModel(config), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    tokens = torch.randint(11, (4, 6))
    optimizer = torch.optim.Adam(trainable(model))
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.01))
    model(input_ids=tokens, labels=tokens).loss.backward()
    with pytest.warns(UnheldWarning, match=r"has no reference .*\(it has adapters\)"):
        optimizer.step()
    moor.consolidate()
    (held,) = moor.coverage().held
    assert (held.how, held.reason.split(" are held")[0]) == ("scores", "virtual tokens")


def test_lora_on_quantized_layers_of_their_own_class():
    """PEFT's layers for bitsandbytes and others have `LoraLayer` and `nn.Module` as bases, and keep no weight."""

    class QuantizedLora(nn.Module, LoraLayer):
        def __init__(self, layer, adapter, config, **_):
            super().__init__()
            LoraLayer.__init__(self, layer)
            self.in_features, self.out_features = 4, 6
            self.update_layer(adapter, config.r, config.lora_alpha, config=config)
            self._active_adapter = adapter

        def forward(self, x):
            a, b = self.lora_A["default"], self.lora_B["default"]
            return self.base_layer(x) + self.scaling["default"] * b(a(x))

    torch.manual_seed(0)
    base = QuantizedLinear(4, 6)
    base.infeatures, base.outfeatures = 4, 6  # as quantized layers of several packages have
    layer = QuantizedLora(base, "default", LoraConfig(r=2, init_lora_weights=True))
    model = nn.Sequential(layer, nn.Tanh(), nn.Linear(6, 3).requires_grad_(False))
    optimizer, moor = moored(model)
    assert hows(moor) == {"product"}
    train(model, optimizer, batches(40, seed=5))
    assert 0.005 <= moor.pull_energy() <= 0.01 * (1 + 1e-4)


def test_adapters_that_are_added_at_once_share_a_budget():
    model = lora()
    model.add_adapter("second", LoraConfig(r=3, target_modules=["0", "2"]))
    model.base_model.set_adapter(["default", "second"])
    optimizer, moor = moored(model)
    train(model, optimizer, batches(40, seed=5))
    held = {entry.name.split(".")[-2] for entry in moor.coverage().held}
    assert held == {"default", "second"}
    assert 0.009 <= moor.pull_energy() <= 0.01 * (1 + 1e-4)


def test_switched_adapter_is_held_while_the_other_spends_nothing():
    model = lora()
    model.add_adapter("second", LoraConfig(r=3, target_modules=["0", "2"]))
    for p in (p for name, p in model.named_parameters() if "lora" in name):
        p.requires_grad_()
    optimizer, moor = moored(model)
    train(model, optimizer, batches(20, seed=5))
    model.set_adapter("second")
    assert moor.pull_energy() == 0
    moor.rebind(torch.optim.Adam(trainable(model), lr=0.05))
    with pytest.warns(UnheldWarning, match="second"):
        train(model, moor._states.optimizer, batches(2, seed=5))
    model.set_adapter("default")
    assert moor.pull_energy() > 0


def test_reference_with_every_adapter_switched_off_is_refused():
    model = lora()
    parameters = trainable(model)
    model.disable_adapter_layers()
    with pytest.raises(MooringError, match="every adapter is switched off"):
        mooring.attach(model, torch.optim.Adam(parameters), reference=batches())


def test_second_adapter_inherits_the_curvature_of_its_layers():
    model = lora()
    optimizer, moor = moored(model)
    train(model, optimizer, batches(20, seed=5))
    moor.consolidate()
    model.add_adapter("second", LoraConfig(r=3, target_modules=["0", "2"]))
    model.set_adapter("second")
    optimizer = torch.optim.Adam(trainable(model), lr=0.05)
    moor.rebind(optimizer)
    train(model, optimizer, batches(40, seed=6))
    second = [entry for entry in moor.coverage().held if ".second." in entry.name]
    assert len(second) == 4
    assert {entry.how for entry in second} == {"product"}
    assert 0.018 <= moor.pull_energy() <= 0.02 * (1 + 1e-4)


def test_merged_adapter_leaves_its_curvature_to_the_next():
    model = lora()
    optimizer, moor = moored(model)
    train(model, optimizer, batches(20, seed=5))
    moor.consolidate()
    x = batches(1)[0][0]
    with torch.no_grad():
        outputs = model(x)
    merged = get_peft_model(model.merge_and_unload(), LoraConfig(r=4, target_modules=["0", "2"]))
    torch.testing.assert_close(merged(x).detach(), outputs, rtol=1e-4, atol=1e-5)
    optimizer = torch.optim.Adam(trainable(merged), lr=0.05)
    moor.rebind(optimizer)
    assert moor.pull_energy() == 0
    train(merged, optimizer, batches(40, seed=6))
    assert hows(moor) == {"product"}
    assert 0.018 <= moor.pull_energy() <= 0.02 * (1 + 1e-4)


def test_switched_off_adapter_spends_nothing():
    model = lora()
    optimizer, moor = moored(model)
    train(model, optimizer, batches(20, seed=5))
    assert moor.pull_energy() > 0
    with model.disable_adapter():
        assert moor.pull_energy() == 0


def test_adapters_without_a_reference_are_warned_of_and_held_once_they_are_consolidated():
    model = lora()
    optimizer = torch.optim.Adam(trainable(model), lr=0.05)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.01))
    assert str(moor.coverage()).startswith("nothing held yet")
    with pytest.warns(UnheldWarning, match="saw no step"):
        moor.consolidate()
    with pytest.warns(UnheldWarning, match=r"has no reference .*\(it has adapters\)"):
        train(model, optimizer, batches(5))
    moor.consolidate()
    assert hows(moor) == {"product"}


def test_adapter_dropout_does_not_change_the_factors():
    states = []
    for dropout in (0.0, 0.5):
        torch.manual_seed(0)
        _, moor = moored(lora(lora_dropout=dropout))
        states.append(moor.state_dict())
    assert all(torch.equal(t, states[1][key]) for key, t in states[0].items() if key.startswith("past_inputs"))


@pytest.mark.gpu
def test_on_a_gpu_a_step_makes_nothing_wait():
    model = lora().cuda()
    data = [(x.cuda(), y.cuda()) for x, y in batches()]
    optimizer, moor = moored(model, data, pull=mooring.Budget(1e-6, measured=False))

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0][0]), data[0][1]).backward()
        optimizer.step()

    for _ in range(5):  # layers are observed in steps 0, 1, 2, 4, 8 ...
        step()
    with waiting_refused():
        step()
        step()
    assert moor.pull_energy() == pytest.approx(1e-6, rel=1e-2)
