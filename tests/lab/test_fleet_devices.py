"""A fleet on a GPU gives what it gives on the CPU, to 1e-9 in float64."""

import pytest
import torch

from lab.small import class_stream, domain_stream, spec_for
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.methods import METHODS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STREAMS = {"classes": class_stream(), "domains": domain_stream()}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", METHODS)
def test_the_same_weights_on_both(method: str, kind: str) -> None:
    stream = STREAMS[kind]
    specs = [spec_for(method, stream, seed, epochs=1) for seed in (0, 1)]
    found = []
    for device in ("cpu", "cuda"):
        fleet = Fleet(specs, stream, device=device)
        results = fleet.sail()
        found.append(({name: p.cpu() for name, p in fleet.stack.parameters.items()}, [r.matrix for r in results]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-9, atol=1e-9)
    assert found[0][1] == [[pytest.approx(row) for row in matrix] for matrix in found[1][1]]


@pytest.mark.parametrize(
    "network", ["lab.test_fleet:normalised", "lab.test_fleet:convolving", "lab.test_fleet:scaling", "cnn6"]
)
def test_other_networks_too(network: str) -> None:
    stream = STREAMS["classes"]
    specs = [spec_for("ewc", stream, seed, epochs=1, network=network) for seed in (0, 1, 2)]
    fleets = [Fleet(specs, stream, device=device) for device in ("cpu", "cuda")]
    for fleet in fleets:
        fleet.sail()
    one, other = (
        {name: t.detach().cpu() for name, t in {**f.stack.parameters, **f.stack.buffers}.items()} for f in fleets
    )
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
