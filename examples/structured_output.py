# %% [markdown]
# # Text that matches a schema
#
# Install, in a checkout of the engine: `pip install '.[grammar]'`
#
# `SamplingParams(structured=...)` makes the text match a JSON schema, a regular expression, one of
# several texts, or a grammar. Before each token is sampled, tokens that would rule out a match are
# masked.

# %%
import json
import re

from engine import LLM, SamplingParams, StructuredOutput

llm = LLM("smollm2", max_model_len=256)
schema = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["Italy", "France", "Japan"]},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "is_capital"],
    "additionalProperties": False,
}
params = SamplingParams(temperature=0.0, max_tokens=60, structured=StructuredOutput(json=schema))
[output] = llm.generate("Rome, as JSON: ", params)
place = json.loads(output.outputs[0].text)
print(place, output.outputs[0].finish_reason)
assert list(place) == schema["required"] and place["country"] in ("Italy", "France", "Japan")

# %% [markdown]
# ## A rule per request
#
# A choice, a regular expression and an unconstrained request in one batch: masks are per request.

# %%
prompts = ["Is water wet? Answer: ", "The first aeroplane flew on ", "Once upon a time"]
kinds = [{"choice": ["yes", "no"]}, {"regex": "[0-9]{1,2} [A-Z][a-z]{2,8} 19[0-9]{2}"}, None]
params = [SamplingParams(temperature=0.0, max_tokens=24, structured=kind) for kind in kinds]
outputs = llm.generate(prompts, params)
for output in outputs:
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
assert outputs[0].outputs[0].text in ("yes", "no")
assert re.fullmatch(kinds[1]["regex"], outputs[1].outputs[0].text)

# %% [markdown]
# ## Grammars
#
# Unlike a regular expression, a grammar may be recursive, for example to match brackets.

# %%
brackets = StructuredOutput(grammar='start: "(" start? ")"')
[output] = llm.generate("(()) ((())) ", SamplingParams(max_tokens=30, seed=1, structured=brackets))
text = output.outputs[0].text
print(text, text.count("(") - text.count(")"))

# %% [markdown]
# ## Errors
#
# A constraint that does not compile is rejected when the request is added.

# %%
try:
    llm.generate("A set: ", SamplingParams(structured={"json": {"uniqueItems": True}}))
except ValueError as error:
    print(error)
