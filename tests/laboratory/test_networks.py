"""Tests of networks: the paper's architectures, and networks from the user's own module."""

import pytest
import torch
from torch import nn

from mooring.errors import MooringError
from mooring_lab.networks import BACKBONES, MultiHeadNetwork, backbone_factory, build_network
from mooring_lab.streams import by_class, digits, permuted


def parameter_count(module):
    return sum(p.numel() for p in module.parameters())


def test_cnn6_equals_the_papers_network():
    network = backbone_factory("cnn6")((3, 32, 32))
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert [c.out_channels for c in convolutions] == [64, 64, 128, 128, 256, 256]
    assert all(c.kernel_size == (3, 3) and c.padding == (1, 1) for c in convolutions)
    names = [name for name, _ in network.named_parameters()]
    assert names == [f"features.{i}.{kind}" for i in (0, 2, 5, 7, 10, 12) for kind in ("weight", "bias")]
    assert parameter_count(MultiHeadNetwork(network, 10, 1, (3, 32, 32))) == 1_186_378  # the paper's 1.2 million


def test_resnet18_third_has_eighteen_layers_and_a_third_of_the_filters():
    network = backbone_factory("resnet18-third")((3, 32, 32))
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convolutions) == 17  # the head is the eighteenth layer
    assert sorted({c.out_channels for c in convolutions}) == [21, 42, 85, 170]
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 170)


@pytest.mark.parametrize("name", BACKBONES)
def test_network_has_one_head_per_task_and_trains(name):
    source = digits()
    stream = by_class(source, 2)
    if name == "cnn6":
        assert build_network(name, stream)(torch.zeros(2, 1, 8, 8), head=4).shape == (2, 2)
    network = build_network(name, stream)
    outputs = network(stream.train.images[:4].float(), head=3)
    outputs.square().sum().backward()
    assert outputs.shape == (4, 2)
    assert all(p.grad is not None for p in network.backbone.parameters())
    trained = [n for n, p in network.heads.named_parameters() if p.grad is not None]
    assert trained == ["3.weight", "3.bias"]
    assert len(build_network(name, permuted(source, 2)).heads) == 1


def test_building_does_not_change_statistics_or_mode():
    network = build_network("resnet18-third", by_class(digits(), 5))
    assert network.backbone.training
    assert all(int(b) == 0 for name, b in network.named_buffers() if name.endswith("num_batches_tracked"))


def test_inherit_copies_a_head():
    network = build_network("mlp", by_class(digits(), 5))
    network.inherit(1, 0)
    assert torch.equal(network.heads[1].weight, network.heads[0].weight)
    assert network.heads[1].weight is not network.heads[0].weight


def own_backbone(shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 7))


def not_a_network(shape):
    return 3


def three_arguments(channels, height, width):
    return nn.Identity()


def no_features(shape):
    return nn.Identity()


def test_network_from_a_function():
    network = build_network(f"{__name__}:own_backbone", by_class(digits(), 5))
    assert network.heads[0].in_features == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cnn7", "unknown network 'cnn7' \\(did you mean 'cnn6'\\?\\)"),
        ("nowhere.at.all:function", "cannot be imported"),
        ("math:nothing", "cannot be imported"),
        ("math:pi", "is not a function"),
        (f"{__name__}:not_a_network", "returned a int, not a torch.nn.Module"),
        (f"{__name__}:three_arguments", "is called with one argument, the tuple \\(channels, height, width\\)"),
        (f"{__name__}:no_features", "features of shape \\(batch, width\\), not a tensor of shape"),
    ],
)
def test_invalid_network_raises_a_one_line_error(name, message):
    with pytest.raises(MooringError, match=message) as error:
        build_network(name, by_class(digits(), 5))
    assert "\n" not in str(error.value)
