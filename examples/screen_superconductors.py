# %% [markdown]
# # Screening superconductors
#
# Install, in a checkout of the engine: `pip install '.[examples,science]'`
#
# A screen asks a model for a property of many materials, to find the few that are worth an
# experiment. We train small attention models on arrays, with the engine's attention and its
# gradient and without any framework: one that reads a chemical formula and predicts the temperature
# at which the material becomes superconducting, and one that reads a crystal site by site. Then we
# screen generated candidates, and ask what the predictions are worth.
#
# The models are in `superconductors/`; start with [network.py](superconductors/network.py). Here
# they run on a CPU in a minute or two, small and on generated data. With SuperCon's table
# (`SUPERCON_CSV=...`) the same cells show real formulas; the full study and its results are
# [a page of their own](../docs/superconductors.md).

# %%
import time
from dataclasses import replace

import numpy as np
from superconductors import compositions, crystals, data, figures, screen, study
from superconductors.inference import FastNetwork
from superconductors.network import Config, Network

# %% [markdown]
# ## The data
#
# SuperCon lists 16,414 formulas with their critical temperatures. Its repository states no licence,
# so it is not part of this one: `data.load` reads a file whose SHA-256 it knows, `data.fetch` gets
# it. Without it, we generate formulas and compute a temperature from a formula of our own. A
# temperature of 0 means that none was reported.

# %%
table = data.load(num_generated=1000)
print(f"{table.source}: {len(table)} rows, {table.is_reported.mean():.0%} with a temperature")
for name, tc in list(zip(table.names, table.tc, strict=True))[:5]:
    print(f"  {name:28} {tc:6.1f} K")

# %% [markdown]
# ## Tokens
#
# A composition is a set of elements with amounts: one token per element, and one for the whole,
# from which the result is read. Sequences are tiny, and an attention kernel computes tiles of 128
# by 128. So sequences of one length are laid side by side, 25 of five tokens in a tile, and a
# `BlockSparse` pattern lets each see itself only. Nothing is padded.

# %%
batch, order = compositions.batch_of(table.compositions[:64])
print(f"{len(batch)} compositions, {len(batch.elements)} tokens")
for group in batch.groups:
    print(f"  {group.count:3} of {group.length} tokens: {group.pattern}")

# %% [markdown]
# ## Is the gradient right?
#
# The backward pass is written by hand, out of the engine's ops: attention, norms, gated units. In
# float64 the slope of the loss along a random direction must be the gradient times the direction.

# %%
rng = np.random.default_rng(0)
exact = Network(Config(hidden=16, num_heads=2, ffn=24), dtype=np.float64)
pull = rng.standard_normal((len(batch), 1))
_, gradient = exact.gradient(batch, lambda outputs: pull)
start, direction, h = exact.flat.copy(), rng.standard_normal(len(exact.flat)), 1e-5
losses = []
for sign in (1, -1):
    exact.update(start + sign * h * direction)
    losses.append(float((pull * exact.predict(batch)).sum()))
slope = (losses[0] - losses[1]) / (2 * h)
print(f"finite difference {slope:.8f}, gradient {gradient @ direction:.8f}")
np.testing.assert_allclose(gradient @ direction, slope, rtol=1e-6)

# %% [markdown]
# ## Train on four folds, test on the fifth
#
# The loss is the mean absolute error; Adam is 20 lines on one flat array. Beside the network: the
# mean of the nearest known compositions, scikit-learn's random forest, and the median.
#
# The network also reads the nearest known compositions, as tokens with a temperature and a
# distance: four more for each sequence.
#
# How rows are divided matters more than the model. SuperCon holds many dopings of one compound, so
# a random fold leaves a neighbour of each test row among the known ones. The split by *system*
# keeps all rows with the same elements together; the split by *family* holds back all cuprates, all
# iron-based compounds, and so on.

# %%
recipe = study.Recipe(num_epochs=15, batch_size=32, hidden=32, num_heads=2, ffn=48, num_layers=1)
results = {}
began = time.perf_counter()
for split in ("random", "system", "family"):
    fold_of = data.folds(table, split)
    fold = int(np.bincount(fold_of).argmax()) if split == "family" else 0
    test = fold_of == fold
    known, tc, wanted = table.compositions[~test], table.tc[~test], table.compositions[test]
    found = {"network": {fold: recipe.train(known, tc, seed=0).predict(wanted)[None]}}
    for kind in study.FORESTS if study.has_forest() else ():
        found[kind] = {fold: study.forest(known, tc, wanted, kind)[None]}
    results[split] = study.study(table, split, found)
print(f"trained and compared in {time.perf_counter() - began:.0f} s; mean absolute errors in K:")
methods = list(results["random"]["errors"])
print(f"{'':14}" + "".join(f"{split:>9}" for split in results))
for method in methods:
    found = (result["errors"][method]["all"] for result in results.values())
    print(f"{method:14}" + "".join(f"{error:9.2f}" for error in found))
random = results["random"]["errors"]
assert random["ensemble"]["all"] < random["median"]["all"] / 2

# %%
figure = figures.predicted(results["random"]["histogram"], "random fold, mix")
figure.savefig("tc_predicted.png", dpi=80)

# %%
figure = figures.by_split(results, ("ensemble", "neighbours", "mix", "random forest", "median"))
figure.savefig("tc_errors.png", dpi=80)

# %% [markdown]
# ## Crystals as sequences
#
# A formula says nothing of the structure. Nine public prototypes do: perovskite, two cuprates, two
# iron pnictides, A15, rocksalt, spinel, diboride. We repeat their cells, put two elements at random
# on each kind of site, and order the sites by height, column by column. The target is a formula
# again, a screened Madelung energy, so that we know what is to be learned.

# %%
samples = crystals.generate(160, seed=1, length=60)
energies = np.array([crystals.energy(crystal) for crystal in samples])
for crystal, energy in list(zip(samples, energies, strict=True))[:4]:
    print(
        f"{crystal.prototype.name:18} {len(crystal):3} sites, cells {crystal.repeats}: "
        f"{energy:6.2f} eV per atom"
    )

# %% [markdown]
# ## A pattern that is the crystal's
#
# In this order a site's rank in its column is its height. `Periodic(period, width, offset)`, with
# a column as its period, is a slab around each site, closed by the crystal's periodic boundary: it
# shows a site its cell, its images in the cells up to h above and below, and everything between.
# Lattice translations map the pattern to itself. Kernels skip the tiles outside of the slab.

# %%
crystal = figures.example_crystal()
seen = crystal.sees(0.25)
sites = np.arange(len(crystal)).reshape(*crystal.repeats, -1)  # their numbers, by cell
for axis in range(3):
    image = np.roll(sites, -1, axis).ravel()  # the site that a translation by one cell maps it to
    assert (seen[np.ix_(image, image)] == seen).all()
print(f"{crystal.prototype.name}, cells {crystal.repeats}: {crystal.pattern(0.25)}")
print(f"a site sees {seen.sum(1)[0]} of {len(crystal)} sites, {seen.mean():.0%}")

# %%
sizes = Config(hidden=32, num_heads=2, ffn=64, num_layers=2)
began = time.perf_counter()
trained = {
    name: crystals.train(samples[:128], energies[:128], config=sizes, num_epochs=8, density=density)
    for name, density in (("dense", 1.0), ("pattern", 0.3))
}
errors = {}
for name, model in trained.items():
    for run, density in (("dense", 1.0), ("pattern", 0.3)):
        found = model.predict(samples[128:], density)
        errors[name, run] = float(np.abs(found - energies[128:]).mean())
        print(f"trained {name:7}, run {run:7}: error {errors[name, run]:.2f} eV per atom")
spread = float(np.abs(energies[128:] - np.median(energies[:128])).mean())
print(f"the median's error is {spread:.2f}; {time.perf_counter() - began:.0f} s")
assert max(errors["dense", "dense"], errors["pattern", "pattern"]) < spread

# %% [markdown]
# What the dense network looks at, with the pattern outlined. An override of the attention op
# (chapter 7 of the course) notes its queries and keys.

# %%
weights = figures.attention_weights(trained["dense"], crystal)
print(f"{weights[seen].sum() / len(crystal):.0%} of the attention is inside of the pattern")
figure = figures.pattern(crystal, weights, 0.25)
figure.savefig("crystal_pattern.png", dpi=80)

# %% [markdown]
# ## The screen
#
# Candidates are substitutions in known structures, of seven elements each. The screen's network
# reads no neighbours: sequences of eight tokens. It runs in fused ops without gradients; on a
# Hopper GPU its products may run in FP8.

# %%
plain = replace(recipe, num_neighbours=0).train(table.compositions, table.tc, seed=0)
fast = FastNetwork(plain.network)
pool = screen.candidates(4000)
outputs, seconds = screen.screen(fast, pool, size=1000)
print(f"{len(pool) / seconds['all']:,.0f} candidates a second")
tile, _ = compositions.batch_of(pool[:1000])
split_time = screen.parts(fast, tile)
for part, taken in split_time.items():
    print(f"  {part:16} {taken / split_time['all']:4.0%}")
found = outputs * compositions.SCALE
np.testing.assert_allclose(np.maximum(found[:500], 0), plain.predict(pool[:500]), atol=1e-2)

# %% [markdown]
# The best, each with the nearest composition that is known, and the share of the atoms that would
# have to be exchanged to get there. The larger that share, the less the prediction rests on.

# %%
for best in study.best_candidates(table, found[None], count=5):
    print(
        f"{best['tc']:6.1f} K  {best['formula']:44} nearest: {best['neighbour']} "
        f"({best['neighbour_tc']:.0f} K), {best['exchanged']:.0%} exchanged"
    )

# %% [markdown]
# ## What none of this proves
#
# - A candidate is a formula. Whether it exists, is stable, or superconducts, no line above asks.
# - A low error on random folds measures how well neighbours are interpolated. The split by family
#   is the honest one for a screen, and its errors are as large as the temperatures themselves.
# - The best of many candidates are those whose errors point upwards.
# - A temperature of 0 in SuperCon is not a measurement. The benchmark counts it as one.
#
# ## Exercises
#
# 1. Run with SuperCon's table. By how much do the errors of the three splits differ?
# 2. Take the token of the whole composition out, and read the mean of the elements' tokens instead.
# 3. Train crystals with densities 0.1 and 0.5. From which density on is the error that of the dense
#    network?
