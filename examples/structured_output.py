# %% [markdown]
# # Text that matches a schema
#
# `SamplingParams(structured=...)` makes the text match a JSON schema, a regular expression, one of
# several texts, or a grammar. Before each token is sampled, all tokens that would rule out a match
# are masked. This needs llguidance: `pip install 'rawengine[grammar]'`.

# %%
import json

from engine import LLM, SamplingParams, StructuredOutput

llm = LLM("smollm2", device="cpu", max_model_len=256)
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
print(json.dumps(json.loads(output.outputs[0].text)), output.outputs[0].finish_reason)

# %% [markdown]
# A choice and a regular expression. A mask applies to its own request only, not to the batch.

# %%
prompts = ["Is water wet? Answer: ", "The first aeroplane flew on ", "Once upon a time"]
kinds = [{"choice": ["yes", "no"]}, {"regex": "[0-9]{1,2} [A-Z][a-z]{2,8} 19[0-9]{2}"}, None]
params = [SamplingParams(temperature=0.0, max_tokens=24, structured=kind) for kind in kinds]
for output in llm.generate(prompts, params):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")

# %% [markdown]
# A grammar may be recursive, unlike a regular expression: matching brackets, for example.

# %%
brackets = StructuredOutput(grammar='start: "(" start? ")"')
[output] = llm.generate("(()) ((())) ", SamplingParams(max_tokens=30, seed=1, structured=brackets))
text = output.outputs[0].text
print(text, text.count("(") - text.count(")"))

# %% [markdown]
# A constraint that cannot be compiled is refused when the request is added.

# %%
try:
    llm.generate("A set: ", SamplingParams(structured={"json": {"uniqueItems": True}}))
except ValueError as error:
    print(error)
