# %% [markdown]
# # Many requests at once
#
# Install, in a checkout of the engine: `pip install .`
#
# `LLM.generate` takes any number of prompts. Underneath, `LLMEngine.step()` advances all running
# requests together: prompts in chunks, and every other request by one token. Requests join and
# leave between steps, and each gets the same tokens as if it ran alone.

# %%
from engine import LLM, LLMEngine, SamplingParams, load

llm = LLM("smollm2", max_model_len=256, max_num_seqs=4)
prompts = ["The capital of Italy is", "Water boils at", "Two plus two equals"]
params = SamplingParams(temperature=0.0, max_tokens=8)
outputs = llm.generate(prompts, params)
for output in outputs:
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
[alone] = llm.generate(prompts[1], params)
assert alone.outputs[0].text == outputs[1].outputs[0].text

# %% [markdown]
# ## Parameters per request
#
# Each request has its own sampling parameters. A seed makes sampled text reproducible in any batch:
# random numbers are keyed by the request's seed and the token's position.

# %%
params = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=10),
    SamplingParams(temperature=0.8, seed=2, max_tokens=10),
    SamplingParams(temperature=0.8, seed=1, max_tokens=10),
]
outputs = llm.generate(["Once upon a time"] * 3, params)
texts = [output.outputs[0].text for output in outputs]
print(*texts, sep="\n")
assert texts[0] == texts[2]

# %% [markdown]
# ## One step at a time
#
# The same, one step at a time. `add_request` may be called between any two steps.

# %%
model = load("smollm2", max_model_len=256)
engine = LLMEngine(model, max_num_seqs=4, max_num_batched_tokens=32)
greedy = SamplingParams(temperature=0.0, max_tokens=6)
engine.add_request("first", "The sky is", greedy)
step = 0
while engine.has_unfinished_requests():
    for output in engine.step():
        print(f"step {step}: {output.request_id:6} {output.outputs[0].text!r}")
    if step == 2:
        engine.add_request("second", "Grass is", greedy)
    step += 1

# %% [markdown]
# ## Timings
#
# Timings of each request, from its metrics (seconds).

# %%
[output] = llm.generate("Hello", SamplingParams(max_tokens=4))
metrics = output.metrics
assert metrics is not None
print("time to first token:", metrics.ttft)
print("decode:", metrics.decode_time)
assert metrics.ttft > 0 and metrics.decode_time > 0
