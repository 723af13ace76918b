"""What does not fit into free memory is refused before any work."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import graticule
from graticule.position.position import ENCODINGS
from graticule.system import memory

#: Encodings of each kind that make them: tables of a formula, an MLP or learned numbers, and weights that mix tokens.
MAKE_PAIRS = ("sandwich", "mirrored_bias", "mlp_bias", "continuous_bias", "fire", "kerple", "sgu", "gqpe", "lrpe_m")


def test_the_free_memory_is_the_least_of_machine_container_and_limit(monkeypatch):
    import resource

    free = memory.free_memory()
    assert 0 < free <= memory._numbers("/proc/meminfo")["MemAvailable:"] * 1024 * 1.1
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**40, 2**40))
    assert memory.free_memory() <= free * 1.1
    used = 2**30 * 64
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used, used))
    assert memory.free_memory() <= used
    files = {"/sys/fs/cgroup/memory.max": {"": 900}, "/sys/fs/cgroup/memory.current": {"": 700}}
    files["/sys/fs/cgroup/memory.stat"] = {"inactive_file": 100}
    monkeypatch.setattr(memory, "_numbers", lambda path: files.get(path, {}))
    assert memory.free_memory() == 300


def has_pairs(positions, tokens):
    """Return whether a layer's position holds a tensor of all pairs of tokens."""
    leaves = tree_leaves([layer._asdict() for layer in positions])
    return any(isinstance(leaf, torch.Tensor) and leaf.shape[-2:] == (tokens, tokens) for leaf in leaves)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_encoding_that_makes_values_of_all_pairs_is_refused_beyond_the_free_memory(monkeypatch, encoding):
    grid = graticule.Grid(12, 14)
    for joining in ("default", "lape"):
        try:
            position = graticule.build_position(
                graticule.Grid(3, 5), dim=24, depth=2, num_heads=3, encoding=encoding, joining=joining
            )
        except ValueError:
            assert joining == "lape"
            continue
        makes_pairs = has_pairs(position(grid), grid.tokens)
        assert makes_pairs or encoding not in MAKE_PAIRS
        with monkeypatch.context() as patch:
            patch.setattr(memory, "free_memory", lambda device=None: 30_000)  # pairs: 113 kB
            patch.setattr(memory, "_SMALL", 0)
            if makes_pairs:
                with pytest.raises(ValueError, match=r"`grid` must be such that .* fit into the free memory"):
                    position(grid)
            else:
                position(grid)


@pytest.mark.parametrize("encoding", ["shaw", "decomposed", "causal", "alibi", "bucketed_bias", "relative_bias"])
def test_biases_of_all_pairs_are_refused_beyond_the_free_memory(monkeypatch, encoding):
    model = graticule.create_model("vit_nano_patch4_28", encoding=encoding, depth=1, num_classes=2)
    monkeypatch.setattr(memory, "free_memory", lambda device=None: 100_000)
    monkeypatch.setattr(memory, "_SMALL", 0)
    images = torch.zeros(1, 1, 28, 28), torch.zeros(1, 1, 112, 112)  # 49 and 784 patches: pairs of 9.6 kB and 2.5 MB
    if encoding in ("shaw", "decomposed"):
        model(images[0])
    with pytest.raises(ValueError, match=r"`grid` must be such that .* fit into the free memory"):
        model(images[1])
