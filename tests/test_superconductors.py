"""The scientific example: gradients, patterns, folds, screen, and the command of the study."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np
import pytest

from engine import device, kernels
from engine.dtypes import np_dtype
from engine.reference._attention import pattern_sees
from examples.superconductors import compositions, crystals, data, elements, ops, screen, study
from examples.superconductors.inference import FastNetwork
from examples.superconductors.neighbours import Neighbours, exchanged
from examples.superconductors.network import Adam, Batch, Config, Network, absolute_slope
from examples.superconductors.training import Step

ONE = crystals.PROTOTYPES[:1]
SMALL = Config(hidden=16, num_heads=2, ffn=24, num_layers=2, seed=1)
BRIEF = study.Recipe(num_epochs=12, batch_size=16, hidden=32, num_heads=2, ffn=48, num_layers=1)


def _neighbours(count, num=3, seed=0):
    rng = np.random.default_rng(seed)
    return 100 * rng.random((count, num), "float32"), 0.1 * rng.random((count, num), "float32")


def _composition_batch():
    table = data.generated(40)
    known = _neighbours(40)
    return compositions.batch_of(table.compositions, known=known, room=24)[0], SMALL


def _crystal_batch():
    found = crystals.generate(4, 3, length=60, columns=(1, 2))
    batch, _ = crystals.batch_of(found, 0.3)
    assert all(group.pattern is not None for group in batch.groups)
    return batch, replace(SMALL, num_features=crystals.NUM_FEATURES)


# ---- the network


@pytest.mark.parametrize("make", [_composition_batch, _crystal_batch])
def test_gradients_are_finite_differences(make):
    """Of every weight, along a random direction, in float64."""
    batch, config = make()
    network = Network(config, dtype=np.float64)
    rng = np.random.default_rng(0)
    pull = rng.standard_normal((len(batch), 1))
    _, gradient = network.gradient(batch, lambda outputs: pull * np.cos(outputs))
    start, step = network.flat.copy(), 1e-5
    for name, part in network.views(gradient).items():
        direction = np.zeros_like(start)
        values = network.views(direction)[name]
        values[...] = rng.standard_normal(values.shape)
        losses = []
        for sign in (1, -1):
            network.update(start + sign * step * direction)
            losses.append((pull * np.sin(network.predict(batch))).sum())
        slope = (losses[0] - losses[1]) / (2 * step)
        np.testing.assert_allclose((part * values).sum(), slope, rtol=1e-5, atol=1e-7, err_msg=name)


def test_gradients_with_dropout_are_those_of_the_masked_network():
    batch, config = _composition_batch()
    network = Network(replace(config, dropout=0.3), dtype=np.float64)
    rng = np.random.default_rng(0)
    direction, start, step = rng.standard_normal(len(network.flat)), network.flat.copy(), 1e-5

    def run(flat):
        network._num_masks = 0
        network.update(flat)
        outputs, gradient = network.gradient(batch, np.ones_like)
        return outputs.sum(), gradient

    slope = (run(start + step * direction)[0] - run(start - step * direction)[0]) / (2 * step)
    np.testing.assert_allclose(run(start)[1] @ direction, slope, rtol=1e-5)
    keep = ops.keep_factors(30_000, 1, 0.3)
    np.testing.assert_allclose(np.unique(keep), [0, 1 / 0.7])
    assert abs(keep.mean() - 1) < 0.02 and (keep != ops.keep_factors(30_000, 2, 0.3)).any()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.05)])
@pytest.mark.parametrize("make", [_composition_batch, _crystal_batch])
@pytest.mark.parametrize("sizes", [(64, 128), (128, 256), (96, 96)])
def test_a_gpu_computes_the_same(cp, make, dtype, tolerance, sizes):
    batch, config = make()
    config = replace(config, hidden=sizes[0], ffn=sizes[1])
    groups = tuple(replace(g, cu_seqlens=cp.asarray(g.cu_seqlens)) for g in batch.groups)
    roots = None if batch.roots is None else cp.asarray(batch.roots)
    arrays = (cp.asarray(batch.elements), cp.asarray(batch.features))
    there = Batch(*arrays, groups, roots)
    host, card = Network(config), Network(config, cp, np_dtype(dtype))
    wanted = np.ones((len(batch), 1), np.float32)
    results = []
    for network, each in ((host, batch), (card, there)):
        aim = network.xp.asarray(wanted)
        outputs, gradient = network.gradient(each, partial(absolute_slope, wanted=aim))
        results.append((device.to_numpy(outputs), device.to_numpy(gradient)))
        fast = device.to_numpy(FastNetwork(network).predict(each))
        assert np.abs(fast - results[-1][0]).max() <= tolerance * np.abs(fast).max()
    for expected, found in zip(*results, strict=True):
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < tolerance
    Adam(1e-2, 10).step(card, cp.asarray(results[1][1]))
    after = card.predict(there)
    assert cp.isfinite(after).all() and (after != cp.asarray(results[1][0])).any()


@pytest.mark.gpu
@pytest.mark.parametrize("density", [1.0, 0.3])
def test_replayed_steps_are_the_steps(cp, density):
    """Graphs of two kinds of batches, in turn, leave the weights that launched kernels leave."""
    config = replace(SMALL, hidden=64, ffn=128, num_features=crystals.NUM_FEATURES)
    rng = np.random.default_rng(0)
    weights = []
    for replays in (True, False):
        network = Network(config, cp, np_dtype("bfloat16"))
        step = Step(network, Adam(1e-2, 20), max_graphs=2 if replays else 0)
        for index in range(10):
            some = crystals.generate(3, index, length=60 + 40 * (index % 2), prototypes=ONE)
            batch, _ = crystals.batch_of(some, density, cp)
            outputs = step(batch, cp.asarray(rng.standard_normal((3, 1)), np.float32))
            assert cp.isfinite(outputs).all()
        assert len(step._graphs) == (2 if replays else 0)
        weights.append(device.to_numpy(network.flat))
        rng = np.random.default_rng(0)
    np.testing.assert_array_equal(*weights)


def test_batches_of_training_are_alike():
    some = crystals.generate(50, 1, length=40)
    batches = crystals._alike(some, 4, np.random.default_rng(0))
    assert sorted(np.concatenate(batches)) == list(range(50))
    assert max(len(batch) for batch in batches) == 4
    assert all(len({some[i].kind for i in batch}) == 1 for batch in batches)


def test_a_composition_sees_only_itself():
    table = data.generated(30)
    tc, distances = _neighbours(30)
    network = Network(SMALL)
    batch, order = compositions.batch_of(table.compositions, known=(tc, distances))
    together = network.predict(batch)
    for place, row in enumerate(order):
        one = slice(row, row + 1)
        alone, _ = compositions.batch_of(table.compositions[one], known=(tc[one], distances[one]))
        np.testing.assert_allclose(network.predict(alone)[0], together[place], rtol=1e-4, atol=1e-5)


def test_the_order_of_elements_changes_nothing():
    table = data.generated(20)
    there = table.compositions
    mixed = np.random.default_rng(0).permuted(np.tile(np.arange(8), (20, 1)), axis=1)
    pairs = (np.take_along_axis(x, mixed, 1) for x in (there.elements, there.amounts))
    again = data.Compositions.from_arrays(*pairs)
    np.testing.assert_array_equal(again.elements, there.elements)
    np.testing.assert_array_equal(again.amounts, there.amounts)


def test_adam_steps():
    """A first step has the size of the learning rate; weights decay; the mean follows."""
    network = Network(SMALL)
    start = network.flat.copy()
    adam = Adam(learning_rate=0.1, num_steps=100, weight_decay=0.5, clip=1e9)
    rate = adam.rate()
    gradient = np.random.default_rng(0).standard_normal(len(start)).astype(np.float32)
    adam.step(network, gradient)
    expected = start * (1 - rate * 0.5) - rate * np.sign(gradient)
    np.testing.assert_allclose(network.flat, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(adam.mean, start + (network.flat - start) * 10 / 11, atol=1e-4)
    np.testing.assert_array_equal(network.weights["head"].ravel(), network.flat[-16:])
    assert rate == pytest.approx(0.02) and adam.rate() == pytest.approx(0.04)
    slope = absolute_slope(np.array([[1.0], [2.0]]), np.array([[2.0], [1.0]]))
    np.testing.assert_array_equal(slope, [[-0.5], [0.5]])


# ---- data


@pytest.mark.parametrize(
    ("formula", "atoms"),
    [
        ("Y1Ba2Cu3O6.9", {"Y": 1, "Ba": 2, "Cu": 3, "O": 6.9}),
        ("Bi2Sr2Y0.9Ca0.1Cu2OY", {"Bi": 2, "Sr": 2, "Y": 0.9, "Ca": 0.1, "Cu": 2, "O": 7}),
        ("Y1Sr2Cu2.75Ge0.25O", {"Y": 1, "Sr": 2, "Cu": 2.75, "Ge": 0.25, "O": 6}),
        ("D0.13Nb1D0.11Nb1", {"H": 0.24, "Nb": 2}),
        ("Sr4V2.7TI0.3O9.51", {"Sr": 4, "V": 2.7, "Ti": 0.3, "O": 9.51}),
        ("La2Sr0Cu0.8Zn0.2O4", {"La": 2, "Cu": 0.8, "Zn": 0.2, "O": 4}),
        ("La1.Sr.5Cu.", {"La": 1, "Sr": 0.5, "Cu": 1}),
        ("Hg1Sr2Ho0.333Ce0.667Cu2O6=z", dict(Hg=1, Sr=2, Ho=0.333, Ce=0.667, Cu=2, O=6)),
    ],
)
def test_formulas(formula, atoms):
    found = data.parse_formula(formula)
    assert {elements.SYMBOLS[number] for number in found} == set(atoms)
    for symbol, amount in atoms.items():
        assert found[elements.NUMBER[symbol]] == pytest.approx(amount)


@pytest.mark.parametrize(
    ("formula", "said"),
    [("Xx2O1", "'Xx'"), ("", "no element"), ("O0", "no"), ("(La0.9Sr0.1)2CuO4", "brackets")],
)
def test_bad_formulas(formula, said):
    with pytest.raises(ValueError, match=said):
        data.parse_formula(formula)


@pytest.mark.parametrize(
    "formula", ["LaFeAsO1", "Y2CuO1", "Sr2CuO1010", "FeSe0.00001", "MgB2", "Sm0.95FeAsO0.85F0.123"]
)
def test_a_formula_that_is_written_is_read_alike(formula):
    [elements], [amounts] = (
        getattr(data.Compositions.from_formulas([formula]), name)
        for name in ("elements", "amounts")
    )
    written = data.format_formula(elements, amounts)
    assert data.parse_formula(written) == pytest.approx(data.parse_formula(formula)), written


def test_a_table_is_known_by_its_checksum(tmp_path, monkeypatch):
    other = tmp_path / "other.csv"
    other.write_text("name,Tc\nNb3Sn1,18\n")
    with pytest.raises(ValueError, match=f"must be {data.SHA256}; got "):
        data.load(other)
    with pytest.raises(FileNotFoundError):
        data.load(tmp_path / "none.csv")
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(b"name,Tc\n"))
    with pytest.raises(ValueError, match="SHA-256"):
        data.fetch(tmp_path / "fetched.csv")
    assert not (tmp_path / "fetched.csv").exists()
    content = b"name,Tc\nNb3Sn1,18\nY1Ba2Cu3O7,0\n"
    monkeypatch.setattr(data, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(data.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(content))
    table = data.load(data.fetch(tmp_path / "fetched.csv"))
    assert table.names == ["Nb3Sn1", "Y1Ba2Cu3O7"]
    assert table.is_reported.tolist() == [True, False]


def test_the_folds_of_supercon_are_in_the_data_file():
    record = json.loads(data.FOLDS.read_text())
    assert record["sha256"] == data.SHA256 and record["rows"] == 16414
    assert record["families"] == list(data.FAMILIES)
    for split, number in (("random", 5), ("system", 5), ("family", 7)):
        given = record["splits"][split]
        fold_of = np.array(list(given["fold_of_row"]), int)
        sizes = np.bincount(fold_of)
        assert len(fold_of) == 16414 and len(sizes) == number and given["seed"] == 0
        assert split == "family" or sizes.max() - sizes.min() < 100
    blank = np.zeros((16414, 8), np.int32)
    rows = data.make_folds(data.Compositions(blank, blank), "random", given["seed"])
    assert "".join(map(str, rows)) == record["splits"]["random"]["fold_of_row"]


@pytest.mark.skipif(not os.environ.get(data.VARIABLE), reason=f"needs {data.VARIABLE}")
def test_the_folds_are_those_of_the_table():
    table = data.load()
    for split in ("random", "system", "family"):
        computed = data.make_folds(table.compositions, split)
        np.testing.assert_array_equal(data.folds(table, split), computed)


def test_splits_keep_together_what_belongs_together():
    table = data.generated(200)
    sets = [frozenset(row) for row in table.compositions.elements]
    fold_of = data.folds(table, "system")
    assert all(
        len({fold_of[i] for i, s in enumerate(sets) if s == each}) == 1 for each in set(sets)
    )
    assert np.bincount(fold_of).max() <= 45
    names = [data.FAMILIES[k] for k in data.folds(table, "family")]
    for row, name in zip(table.compositions.elements, names, strict=True):
        symbols = {elements.SYMBOLS[number] for number in row}
        assert (name == "cuprate") == ({"Cu", "O"} <= symbols)
    with pytest.raises(ValueError, match="got 'by name'"):
        data.make_folds(table.compositions, "by name")


def test_properties_of_elements():
    numbers = [elements.NUMBER[symbol] for symbol in ("O", "Fe", "La", "Lu", "Pb")]
    # period, group, electrons in s, p, d, f
    expected = [(2, 16, 2, 4, 0, 0), (4, 8, 2, 0, 6, 0), (6, 3, 2, 0, 0, 1), (6, 3, 2, 0, 1, 14)]
    expected += [(6, 14, 2, 2, 10, 14)]
    shells = elements._shells()[numbers]
    np.testing.assert_array_equal(shells, expected)
    np.testing.assert_allclose(elements.PROPERTIES[1:].mean(0), 0, atol=1e-12)


def _distances(a, b, known):
    """Return the distances (len(a), len(b)) by the formula of `Neighbours`, in float64."""
    statistics = [data.element_features(each)[:, 97:].astype(float) for each in (a, b, known)]
    mean, deviation = statistics[2].mean(0), statistics[2].std(0)
    traits = []
    for each, values in zip((a, b), statistics, strict=False):
        amounts = np.zeros((len(each), 97))
        for row in range(len(each)):
            for element, amount in zip(each.elements[row], each.amounts[row], strict=True):
                amounts[row, element] = amount if element else 0
        scaled = 0.01 * (values - mean) / np.maximum(deviation, 1e-6)
        traits.append(np.hstack([each.by_element(), 0.05 * np.log1p(amounts), scaled]))
    return 0.5 * np.abs(traits[0][:, None] - traits[1][None]).sum(2)


def test_neighbours():
    table = data.generated(60)
    there = table.compositions
    neighbours = Neighbours(there[:40], table.tc[:40], count=2)
    rows, distances = neighbours.nearest(there[40:], 3)
    full = _distances(there[40:], there[:40], there[:40])
    np.testing.assert_allclose(distances, np.sort(full, 1)[:, :3], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(full, rows, 1), distances, atol=1e-5)
    weights = 1 / (distances[:, :2] + 2e-3) ** 2
    mean = (weights * table.tc[rows[:, :2]]).sum(1) / weights.sum(1)
    np.testing.assert_allclose(neighbours.predict(there[40:]), mean, rtol=1e-5)
    others, _ = neighbours.nearest(there[:40], 1, skip=np.arange(40))
    assert (others[:, 0] != np.arange(40)).all()
    assert Neighbours(there, table.tc).count in Neighbours.COUNTS
    pair = data.Compositions.from_formulas(["Y1Ba2Cu3O6", "Y1Ba2Cu3O4F2"])
    np.testing.assert_allclose(exchanged(pair[:1], pair[1:]), 2 / 12, rtol=1e-6)


def test_neighbours_help_where_the_formula_does_not_tell():
    """Dopings of a compound share a number that its elements do not show."""
    table = data.generated(400)
    test = data.folds(table) == 0
    known, tc, wanted = table.compositions[~test], table.tc[~test], table.compositions[test]
    trained = BRIEF.train(known, tc, seed=0)
    error = np.abs(trained.predict(wanted) - table.tc[test]).mean()
    alone = np.abs(np.median(tc) - table.tc[test]).mean()
    assert error < 0.6 * alone


# ---- crystals


def _images(crystal, step):
    """Return the token to which a translation by cells maps each token, by its coordinates."""
    places = {tuple(p): i for i, p in enumerate(crystal.fractions.round(5).tolist())}
    moved = (crystal.fractions + step) % crystal.repeats
    moved = np.where(crystal.repeats - moved < 1e-4, 0, moved)
    return np.array([places[tuple(p)] for p in moved.round(5).tolist()])


@pytest.mark.parametrize("prototype", crystals.PROTOTYPES, ids=lambda each: each.name)
def test_the_pattern_is_that_of_the_crystals_translations(prototype):
    """Operation by operation: of all lattice translations of the repeated cell."""
    repeats = (1, 2, 5) if len(prototype.sites) > 20 else (2, 3, 7)
    length = len(prototype.sites) * np.prod(repeats)
    crystal = crystals.generate(1, length=int(length), columns=repeats[:2], prototypes=[prototype])[
        0
    ]
    assert crystal.repeats == repeats
    pattern = crystal.pattern(0.4)
    steps = crystal.steps(0.4)
    tokens = np.arange(len(crystal))
    seen = pattern_sees(pattern, tokens, tokens)
    np.testing.assert_array_equal(crystal.sees(0.4), seen)
    for step in np.ndindex(repeats):
        image = _images(crystal, step)
        # The operation maps the pattern to itself.
        np.testing.assert_array_equal(seen[np.ix_(image, image)], seen)
        # A site sees its image exactly under translations by at most `steps` cells up or down.
        height = min(step[2], repeats[2] - step[2])
        assert (seen[tokens, image] == (height <= steps)).all(), step
    # Between these images it sees all sites by height, in every column, and nothing else.
    x, y, z = crystal.fractions.T
    columns = np.floor(x + 1e-6) * repeats[1] + np.floor(y + 1e-6)
    rank = np.empty(len(crystal), int)
    for column in np.unique(columns):
        inside = np.flatnonzero(columns == column)
        key = (y[inside].round(5) % 1, x[inside].round(5) % 1, z[inside].round(5))
        rank[inside[np.lexsort(key)]] = np.arange(len(inside))
    apart = np.abs(rank[:, None] - rank)
    apart = np.minimum(apart, crystal.column - apart)
    np.testing.assert_array_equal(seen, apart <= steps * crystal.cell_sites)


def test_densities():
    crystal = crystals.generate(1, length=2000, prototypes=crystals.PROTOTYPES[:1])[0]
    pattern = crystal.pattern(0.25)
    assert len(crystal) == 2000 and pattern.period == 2000
    assert pattern.width / pattern.period == pytest.approx(0.25, abs=0.01)
    assert crystal.pattern(1.0) is None
    assert crystal.pattern(0.25) is pattern, "a pattern is made once"


def test_prototypes_have_the_known_neighbours():
    """Bond lengths and coordination numbers from the literature."""
    by_name = {each.name: each for each in crystals.PROTOTYPES}
    cases = [
        ("spinel", 0, 2, 4, 2.003),  # Mg-O tetrahedron
        ("spinel", 1, 2, 6, 2.003),
        ("perovskite", 1, 2, 6, 1.9525),
        ("iron pnictide 122", 1, 2, 4, 2.399),
        ("iron pnictide 1111", 1, 2, 4, 2.411),
        ("A15", 0, 0, 2, 2.645),  # chains of Nb
        ("rocksalt", 0, 1, 6, 2.195),
        ("diboride", 1, 1, 3, 1.782),  # graphite-like layers
        ("cuprate 214", 1, 2, 4, 1.8935),
    ]
    shifts = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3), -1).reshape(-1, 3)
    for name, kind, other, count, length in cases:
        p = by_name[name]
        images = (p.positions[None] + shifts[:, None]).reshape(-1, 3)
        kinds = np.tile(p.site_kinds, len(shifts))
        for site in p.positions[p.site_kinds == kind]:
            r = np.linalg.norm((images[kinds == other] - site) @ np.array(p.lattice), axis=1)
            near = np.sort(r[r > 1e-6])
            np.testing.assert_allclose(near[:count], length, atol=0.002, err_msg=name)
            assert near[count] > near[0] + 0.1, name


def test_energies_are_sums_over_pairs():
    kinds = [crystals.PROTOTYPES[number] for number in (0, 4, 8)]  # the last is hexagonal
    for kind in kinds:
        crystal = crystals.generate(1, 3, length=30, columns=(1, 2), prototypes=[kind])[0]
        box = crystal.lattice * np.array(crystal.repeats)[:, None]
        places = crystal.fractions @ crystal.lattice
        chi = elements.ELECTRONEGATIVITY[crystal.elements]
        charges = chi.mean() - chi
        total = 0.0
        for shift in np.ndindex(9, 7, 3):  # 8 angstrom reach no further
            between = places[None] - places[:, None] + (np.array(shift) - (4, 3, 1)) @ box
            r = np.linalg.norm(between, axis=-1)
            near = (r > 1e-6) & (r < 8)
            terms = np.exp(-r / 2.5) / np.where(near, r, 1)
            total += (np.outer(charges, charges) * terms)[near].sum()
        expected = 14.4 / 2 * total / len(crystal)
        assert crystals.energy(crystal) == pytest.approx(expected, rel=1e-9)


def test_crystals_train_with_and_without_the_pattern():
    known = crystals.generate(72, 1, length=40)
    energies = np.array([crystals.energy(crystal) for crystal in known])
    alone = np.abs(energies[56:] - np.median(energies[:56])).mean()
    for density in (1.0, 0.3):
        trained = crystals.train(
            known[:56], energies[:56], config=SMALL, num_epochs=8, density=density
        )
        found = trained.predict(known[56:], density)
        assert np.abs(found - energies[56:]).mean() < 0.7 * alone


# ---- the screen


def test_the_fast_network_is_the_network():
    batch, config = _crystal_batch()
    for dtype, tolerance in ((np.float32, 1e-5), (ml_dtypes.bfloat16, 0.05)):
        network = Network(config, dtype=dtype)
        found = FastNetwork(network).predict(batch)
        expected = network.predict(batch)
        assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    # Products in e4m3, and without a pattern attention, too.
    network = Network(config, dtype=ml_dtypes.bfloat16)
    fast = FastNetwork(network, "fp8")
    fast.FP8_KEYS = 1
    dense = tuple(replace(group, pattern=None) for group in batch.groups)
    for each in (batch, replace(batch, groups=dense)):
        expected = network.predict(each)
        error = np.abs(fast.predict(each) - expected).max()
        assert 0 < error < 0.15 * np.abs(expected).max()
    with pytest.raises(ValueError, match="16-bit network; got float32"):
        FastNetwork(Network(config), "fp8")
    with pytest.raises(ValueError, match="got 'int3'"):
        FastNetwork(network, "int3")


def test_the_examples_ops_are_those_of_the_engine():
    """The formulas of `ops`, and the engine's mirrors that they replace."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return (0.3 * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16)

    x, mixed, norm, out = draw(50, 64), draw(50, 64), 1 + draw(64), draw(64, 64)
    gate_up, down, qkv = draw(128, 64), draw(64, 64), draw(192, 64)

    def finished(first):
        inner = kernels.gemm(kernels.rmsnorm(first, norm), gate_up, activation="swiglu")
        return kernels.gemm(inner, down, residual=first)

    weights = (norm, gate_up, down)
    found = ops.finish_layer(x, *weights, mixed, out)
    _assert_near(found, finished(kernels.gemm(mixed, out, residual=x)))
    elements, features, of_features = np.arange(50, dtype=np.int32) % 7, draw(50, 48), draw(64, 48)
    rows = kernels.embedding(elements, x[:7])
    found = ops.first_layer(elements, features.astype(np.float32), x[:7], of_features, *weights)
    _assert_near(found, finished(kernels.gemm(features, of_features, residual=rows)))
    tokens = draw(40, 3, 2, 32)
    bounds = np.arange(0, 41, 8, dtype=np.int32)
    options = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 8, "causal": False}
    expected = kernels.attention_prefill(*(tokens[:, i] for i in range(3)), **options)
    found = ops.short_attention(tokens.reshape(5, 8, 3, 2, 32))
    _assert_near(found.reshape(expected.shape), expected)
    expected = kernels.gemm(kernels.rmsnorm(x, norm), qkv)
    _assert_near(ops.norm_product(x, norm, qkv), expected)
    codes = ops.norm_product_codes(x, norm, qkv, np.full(192, 40, np.float32))
    found = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / 40
    _assert_near(found, expected, 0.05)
    found = ops.weight_gradient(x, mixed)
    expected = kernels.gemm(x.T.copy(), mixed.T.copy(), out_dtype=np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    rows = draw(3, 7, 16)
    _assert_near(ops.mean_rows(rows), rows.astype(np.float32).mean(1))


def _assert_near(found, expected, tolerance=0.02):
    """Assert that values are equal but for roundings, by default to bfloat16."""
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [n for n in ops.__all__ if hasattr(getattr(ops, n), "source") and n != "norm_product_codes"],
)
def test_the_examples_kernels(cp, name):
    report = kernels.check(getattr(ops, name), show=False)
    assert report.ok, str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 100, 5000])
def test_codes_are_the_products(cp, rows):
    rng = np.random.default_rng(rows)
    x, norm, weight = (
        cp.asarray(rng.standard_normal(shape), np.float32).astype(np_dtype("bfloat16"))
        for shape in ((rows, 128), 128, (384, 128))
    )
    factors = cp.asarray(rng.uniform(0.5, 4, 384), np.float32)
    codes = device.to_numpy(ops.norm_product_codes(x, norm, weight, factors))
    expected = device.to_numpy(ops.norm_product(x, norm, weight)).astype(np.float32)
    expected = np.clip(expected * device.to_numpy(factors), -448, 448)
    found = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_allclose(found, expected, rtol=0.0725, atol=0.02)


@pytest.mark.gpu
def test_fp8_attention_with_the_scales_of_the_first_batch(cp):
    config = Config(num_heads=2, num_features=crystals.NUM_FEATURES)
    some = crystals.generate(3, 1, length=1200, prototypes=ONE)
    network = Network(config, cp, np_dtype("bfloat16"))
    batch, _ = crystals.batch_of(some, 1.0, cp)
    fast = FastNetwork(network, "fp8")
    expected = FastNetwork(network).predict(batch)
    for _ in range(2):
        error = abs(fast.predict(batch) - expected).max()
        assert 0 < error < 0.05 * abs(expected).max()


@pytest.mark.gpu
def test_hopper_takes_the_examples_ops(cp):
    if cp.cuda.Device().compute_capability != "90":
        pytest.skip("they are for Hopper")
    for hidden, ffn, expected in ((128, 256, 1), (64, 128, 1), (96, 96, 0), (128, 320, 0)):
        assert ops.are_for(cp, Config(hidden=hidden, ffn=ffn)) == bool(expected)


def test_candidates_have_seven_elements():
    found = screen.candidates(400)
    assert (found.counts == 7).all() and (found.amounts[:, :7] > 0).all()
    for template in screen.TEMPLATES.values():
        assert sum(shared for _, shared, _ in template) == 7
    assert all(len(set(row[:7])) == 7 for row in found.elements)
    np.testing.assert_array_equal(found.elements, screen.candidates(400).elements)
    sums = {round(float(row.sum()), 2) for row in found.amounts}
    atoms = {round(sum(a for _, _, a in t), 2) for t in screen.TEMPLATES.values()}
    assert sums == atoms


def test_the_screen_returns_every_candidates_prediction():
    found = screen.candidates(50)
    network = Network(SMALL)
    fast = FastNetwork(network)
    outputs, seconds = screen.screen(fast, found, size=20)
    batch, order = compositions.batch_of(found)
    np.testing.assert_allclose(outputs[order], network.predict(batch)[:, 0], rtol=1e-4, atol=1e-5)
    assert 0 < seconds["batches"] <= seconds["all"]
    split = screen.parts(fast, batch)
    assert min(split.values()) > 0
    assert sum(split.values()) - split["all"] <= split["all"]
    some = crystals.generate(3, length=40)
    config = replace(SMALL, num_features=crystals.NUM_FEATURES)
    network = Network(config)
    outputs, _ = screen.screen(FastNetwork(network), some, density=0.3, size=2)
    for crystal, output in zip(some, outputs, strict=True):
        alone = network.predict(crystals.batch_of([crystal], 0.3)[0])
        np.testing.assert_allclose(output, alone[0, 0], rtol=1e-4, atol=1e-5)


# ---- the study


def test_errors_are_means_of_the_rows_that_were_predicted():
    table = data.generated(100)
    found = table.tc + np.where(np.arange(100) % 2, 1.0, -3.0).astype(np.float32)
    found[:10] = np.nan
    errors = study.errors(table, found, "random")
    assert errors["all"] == pytest.approx(2.0, abs=1e-3) and errors["rows"] == 90
    fold_of = data.folds(table)
    of_fold = np.abs(found - table.tc)[(fold_of == 0) & ~np.isnan(found)].mean()
    assert errors["folds"][0] == pytest.approx(of_fold, abs=1e-3)
    reported = np.abs(found - table.tc)[table.is_reported & ~np.isnan(found)].mean()
    assert errors["reported"] == pytest.approx(reported, abs=1e-3)


def test_methods_are_compared_on_the_folds_that_they_have():
    table = data.generated(100)
    fold_of = data.folds(table)
    sizes = np.bincount(fold_of)
    found = {
        "network": {0: np.stack([table.tc[fold_of == 0] + step for step in (1.0, 2.0, 9.0)])},
        "extra trees": {k: table.tc[fold_of == k][None] - 4 for k in (0, 1)},
    }
    result = study.study(table, "random", found)
    errors = result["errors"]
    assert errors["ensemble"]["all"] == pytest.approx(2, abs=1e-3)
    assert errors["extra trees"]["all"] == pytest.approx(4, abs=1e-3)
    np.testing.assert_allclose(result["network"][0], [1, 2, 9], atol=1e-3)
    assert result["folds"] == [0] and np.sum(result["histogram"]) == sizes[0]
    assert {each["rows"] for each in errors.values()} == {sizes[0]}
    assert set(errors) == {"ensemble", "neighbours", "mix", "median", "extra trees"}
    known = table.compositions[fold_of != 0]
    neighbours = Neighbours(known, table.tc[fold_of != 0])
    mix = (neighbours.predict(table.compositions[fold_of == 0]) + found["network"][0][1]) / 2
    error = np.abs(mix - table.tc[fold_of == 0]).mean()
    assert errors["mix"]["all"] == pytest.approx(error, abs=1e-3)
    trees = study.study(table, "random", {"network": {}, "extra trees": found["extra trees"]})
    assert trees["folds"] == [0, 1] and set(trees["errors"]) == {
        "neighbours",
        "median",
        "extra trees",
    }


def test_too_few_rows_are_refused():
    table = data.generated(12)
    with pytest.raises(ValueError, match="batch_size must be at most 12, the rows; got 16"):
        BRIEF.train(table.compositions, table.tc, seed=1)
    few = replace(BRIEF, batch_size=4, num_neighbours=12)
    with pytest.raises(ValueError, match="count of neighbours must be at most 11; got 12"):
        few.train(table.compositions, table.tc, seed=0)
    with pytest.raises(ValueError, match="batch_size must be at most 2, the crystals; got 8"):
        crystals.train(crystals.generate(2), np.ones(2), config=SMALL, num_epochs=1)


def test_the_study_continues_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "load", lambda *_: data.generated(200))
    monkeypatch.setattr(study, "has_forest", lambda: False)
    given = "--splits random screen --folds 0 1 --seeds 1 --epochs 1 --candidates 30 --device cpu"
    files = ["--members", str(tmp_path), "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["study", *given.split(), *files])
    study.main()
    assert "3 of 3 models to train" in capsys.readouterr().out
    record = json.loads((tmp_path / "found.json").read_text())
    assert {"card", "date", "commit", "command", "rows"} <= set(record)
    (row,) = record["rows"]
    fold_of = data.folds(data.generated(200))
    assert row["errors"]["mix"]["rows"] == (fold_of < 2).sum() == np.sum(row["histogram"])
    assert set(row["errors"]) == {"ensemble", "neighbours", "mix", "median"}
    assert [len(members) for members in row["network"].values()] == [1, 1]
    assert len(record["best_candidates"]) == 10
    next(tmp_path.glob("*/*.npz")).rename(tmp_path / "other.part")  # one that was being written
    study.main()
    assert "1 of 3 models to train" in capsys.readouterr().out
    study.main()
    assert "0 of 3 models to train" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == record["rows"]
    sys.argv[sys.argv.index("30")] = "5"  # the kept predictions are of other candidates
    study.main()
    assert "1 of 3 models to train" in capsys.readouterr().out
    again = json.loads((tmp_path / "found.json").read_text())
    assert len(again["best_candidates"]) == 5 and again["rows"] == record["rows"]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--json", "/no/folder/x.json", "--json: must be in an existing folder; got /no/folder"),
        ("--jobs", "0", "--jobs: must be at least 1; got 0"),
        ("--candidates", "-1", "--candidates: must be at least 1; got -1"),
    ],
)
def test_the_study_names_a_bad_option_before_it_trains(
    monkeypatch, capsys, tmp_path, option, value, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["study", option, value])
    with pytest.raises(SystemExit):
        study.main()
    assert said in capsys.readouterr().err
