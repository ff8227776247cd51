"""The layers of a decoder, each a set of weights and the ops that are launched with them."""
